"""What content predictors read of a prompt, in place of its text."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]
Columns = NDArray[np.int32]

WORD_COLUMNS = 2**18
LAYERS = 3  # of the encoder, whose states are kept: meaning, and more of the wording before it
NUMBERS = (  # each as log(1 + x)
    "user_input_chars",
    "instruction_chars",
    "prompt_tokens",
    "turns",  # answers already given in this conversation
    "last_answer_tokens",
    "mean_answer_tokens",
)


@dataclass(frozen=True, slots=True)
class Features:
    """Meaning, words and sizes of one prompt.

    instruction, user_input: [LAYERS, dim]: the mean states of the encoder's last layers, each of
        unit length; the last row is the sentence embedding, repeated where its pooling changes
        the dimension. Zeros where a part is empty, and for layers the encoder lacks.
    words: hashed word uni- and bigrams of both parts, columns in [0, WORD_COLUMNS), ascending,
        once each, at most 512.
    numbers: [len(NUMBERS)], in the order of NUMBERS.
    """

    instruction: Vector
    user_input: Vector
    words: Columns
    numbers: Vector
