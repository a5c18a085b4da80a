"""The demo model's small closed world: its words, their kinds, and how they are written elsewhere.

Every word is one token with and without a leading space (models.tokenizer sees to it), while
Veldish letters and emoji are several byte tokens each, so that streamed text really has to wait
for the rest of a character.
"""

KINDS: dict[str, tuple[str, ...]] = {
    "fruit": tuple("apple pear plum fig lemon lime mango melon peach grape kiwi berry".split()),
    "animal": tuple("cat dog cow hen pig fox owl bee ant bear wolf frog".split()),
    "color": tuple("red blue green pink gray black white brown gold tan".split()),
    "food": tuple("milk bread egg rice soup salt tea cake corn bean".split()),
    "thing": tuple("pen cup key box lamp book chair spoon rope clock".split()),
    "nature": tuple("sun moon star rain snow wind tree leaf sea fire".split()),
}
KIND_OF = {word: kind for kind, words in KINDS.items() for word in words}
WORDS = tuple(KIND_OF)

EMOJI = dict(
    apple="🍎", pear="🍐", lemon="🍋", mango="🥭", melon="🍈", peach="🍑", grape="🍇", kiwi="🥝",
    cat="🐱", dog="🐶", cow="🐮", hen="🐔", pig="🐷", fox="🦊", owl="🦉", bee="🐝", ant="🐜",
    bear="🐻", wolf="🐺", frog="🐸", milk="🥛", bread="🍞", egg="🥚", rice="🍚", tea="🍵",
    cake="🍰", corn="🌽", key="🔑", box="📦", book="📖", moon="🌙", star="⭐", snow="❄",
    tree="🌳", leaf="🍃", sea="🌊", fire="🔥", sun="🌞",
)  # fmt: skip

_VELDISH_LETTERS = str.maketrans("aeiouncslk", "åéïøüñčšłḱ")


def veldish(word: str) -> str:
    """`word` in Veldish, our cipher: written backwards, ten letters replaced ("red" → "dér")."""
    return word[::-1].translate(_VELDISH_LETTERS)
