"""What ran, and when: values, summaries, tables and the picture. A leaf: all may import it."""
