"""The demo model's tokenizer: byte-level BPE over the tasks' ASCII text.

Decoding the encoded text returns the same text. Each word of the tasks and each number up to 300 is
one token, with and without a leading space. No merge joins bytes outside ASCII, so every other
character is 2 to 4 tokens.
"""

from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from models.chat import CHAT_TEMPLATE, END
from models.exchanges import EXCHANGES
from models.tasks import GENERIC_SYSTEM, LARGEST, PHRASINGS
from models.words import KINDS, WORDS

PAD = "<|pad|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = [END, PAD, *(f"<|{role}|>" for role in ROLES)]
MAX_LENGTH = 2048  # tokens of prompt and answer
VOCABULARY_LIMIT = 2048  # not reached: the corpus has fewer merges

# Splits text before merging into words, numbers and marks, each with its leading space.
_PIECES = Regex(r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]|\s")


def _corpus() -> Iterator[str]:
    """Yields the text to merge: each word many times in both forms, then the instructions."""
    for word in (*WORDS, *KINDS):
        yield from [f"{word} {word}"] * 50
    for number in range(LARGEST + 1):
        yield from [f"{number} {number}"] * 50
    for phrasing in PHRASINGS.values():
        yield from [*phrasing.user, phrasing.system] * 10
    yield from GENERIC_SYSTEM * 10
    for prompt, answer in EXCHANGES.items():
        yield from [_ascii(prompt), _ascii(answer)] * 4


def _ascii(text: str) -> str:
    return text.encode("ascii", "ignore").decode()


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Returns the tokenizer, the same on every call. It adds no tokens to a prompt."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_LIMIT,
        min_frequency=4,
        show_progress=False,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    bpe.train_from_iterator(_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=SPECIAL_TOKENS[2:],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    )
