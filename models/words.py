"""Vocabulary of the demo model: words, their kinds, emoji, and their translation to Veldish.

Every word is one token with and without a leading space. Veldish letters and emoji are several byte
tokens each, so that streaming has to wait for the rest of a character.
"""

_KINDS = """
fruit apple pear plum fig lemon lime mango melon peach grape kiwi berry
animal cat dog cow hen pig fox owl bee ant bear wolf frog
color red blue green pink gray black white brown gold tan
food milk bread egg rice soup salt tea cake corn bean
thing pen cup key box lamp book chair spoon rope clock
nature sun moon star rain snow wind tree leaf sea fire
"""
KINDS = {line.split()[0]: tuple(line.split()[1:]) for line in _KINDS.strip().splitlines()}
KIND_OF = {word: kind for kind, words in KINDS.items() for word in words}
WORDS = tuple(KIND_OF)

_DRAWN = """
apple 🍎 pear 🍐 lemon 🍋 mango 🥭 melon 🍈 peach 🍑 grape 🍇 kiwi 🥝 cat 🐱
dog 🐶 cow 🐮 hen 🐔 pig 🐷 fox 🦊 owl 🦉 bee 🐝 ant 🐜 bear 🐻
wolf 🐺 frog 🐸 milk 🥛 bread 🍞 egg 🥚 rice 🍚 tea 🍵 cake 🍰 corn 🌽
key 🔑 box 📦 book 📖 moon 🌙 star ⭐ snow ❄ tree 🌳 leaf 🍃 sea 🌊
fire 🔥 sun 🌞
"""
EMOJI = dict(zip(_DRAWN.split()[::2], _DRAWN.split()[1::2], strict=True))

_VELDISH_LETTERS = str.maketrans("aeiouncslk", "åéïøüñčšłḱ")


def veldish(word: str) -> str:
    """Translates to Veldish, a cipher: reversed, with ten letters replaced ("red" → "dér")."""
    return word[::-1].translate(_VELDISH_LETTERS)
