"""The tokenizer of a model that has it only as Mistral's tekken.json."""

from pathlib import Path
from typing import Any

from tokenizers.processors import TemplateProcessing

from services.runtime.refusals.folder import TEKKEN

EXTRA = "pip install 'foretoken[mistral]'"


def load_tekken(folder: Path) -> Any:
    """transformers' fast tokenizer of a folder with a tekken.json; its `backend_tokenizer` puts the
    beginning token before a text, as Mistral's own does. Without a chat template in the folder,
    mistral-common makes one if it is installed. Raises ValueError with a sentence."""
    try:
        from transformers.integrations.mistral import convert_tekken_tokenizer

        tokenizer = convert_tekken_tokenizer(str(folder / TEKKEN))
    except ImportError:  # an earlier format, without its special tokens
        raise ValueError(f"{folder / TEKKEN} needs mistral-common: {EXTRA}") from None
    except Exception as error:  # of many types; the first line says what is wrong
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"{folder / TEKKEN} cannot be read: {reason}") from None
    begin, begin_id = tokenizer.bos_token, tokenizer.bos_token_id
    if begin_id is not None:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, begin_id)]
        )
    return tokenizer
