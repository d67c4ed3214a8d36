"""Text at the edge of the system: tokenizer, incremental detokenizer, stop strings, chat template.

The engine sees token ids only. No torch here.
"""

from orca_dist.text.chat import ChatTemplate
from orca_dist.text.detokenizer import Detokenizer
from orca_dist.text.stop import StopMatcher
from orca_dist.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Detokenizer", "StopMatcher", "Tokenizer"]
