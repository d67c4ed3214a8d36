"""Where a stage computes, behind one small seam: `cpu`, `cuda`, and `checked` for tests."""
