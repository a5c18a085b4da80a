"""Compilation and masks of realistic JSON schemas: llguidance, and XGrammar in a peer's Python.

    python -m benchmarks.grammars [--model FOLDER] [--peer-python PYTHON] [--json FILE]

Compilation runs to the first mask. llguidance's includes the gateway's checks and the worker's own
compilation. Masks are those along an answer that is drawn at random under each schema.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from benchmarks.grammars import engines
from benchmarks.grammars.schemas import make_schemas
from benchmarks.harness.report import parser, show, write
from foretoken.running.options import demo_model
from gateway.grammars.compiling.compilation import compile_constraint
from gateway.grammars.faults import GrammarFault
from gateway.types.constraint import Constraint, ConstraintKind
from services.worker.folder import load_tokenizer, read_eos_ids

MAX_TOKENS, CLOSING_SHARE = 300, 0.5
ROOT = Path(__file__).parents[2]


def draw_answer(tokenizer: LLTokenizer, schema: str, random: Random) -> list[int]:
    """Tokens under a schema; none if it is refused. Half of the steps end what they can."""
    try:
        grammar = compile_constraint(Constraint(ConstraintKind.JSON_SCHEMA, schema), tokenizer)
    except GrammarFault:
        return []
    matcher, answer = LLMatcher(tokenizer, grammar, log_level=0), list[int]()
    while len(answer) < MAX_TOKENS and not matcher.is_stopped():
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.unpackbits(bits, bitorder="little").nonzero()[0].tolist()
        closing = [token for token in allowed if tokenizer.decode_str([token]) in '"]},:']
        ends = closing and random.random() < CLOSING_SHARE
        token = random.choice(closing if ends else allowed)
        if token in tokenizer.eos_tokens or not matcher.consume_token(token):
            break
        answer.append(token)
    return answer


def make_job(folder: str, schemas: Sequence[str]) -> dict[str, object]:
    """What `engines` reads: a vocabulary, schemas, and an answer of each."""
    text, eos_ids = load_tokenizer(folder).to_str(), sorted(read_eos_ids(folder))
    tokenizer = LLTokenizer(text, eos_token=eos_ids)
    words = [tokenizer.decode_bytes([token]).hex() for token in range(tokenizer.vocab_size)]
    answers = [draw_answer(tokenizer, each, Random(at)) for at, each in enumerate(schemas)]
    same = {"tokenizer": text, "vocabulary": words, "eos_ids": eos_ids}
    return {**same, "schemas": schemas, "answers": answers}


def run_library(python: str, library: str, job: str) -> list[dict[str, Any] | None]:
    path = {"PYTHONPATH": str(ROOT) if library == "llguidance" else ""}
    command = [python, str(Path(engines.__file__)), library]
    done = subprocess.run(
        command, input=job, stdout=subprocess.PIPE, text=True, env=path, check=True
    )
    found: list[dict[str, Any] | None] = json.loads(done.stdout.splitlines()[-1])
    return found


def summarize(found: Sequence[dict[str, Any] | None]) -> dict[str, float]:
    enforced = [each for each in found if each]
    masks_ms = [mask_ms for each in enforced for mask_ms in each["masks_ms"]]
    kinds = {"compile": [each["compile_ms"] for each in enforced], "mask": masks_ms}
    figures = {
        f"{kind} {name}, ms": float(np.percentile(times_ms, share))
        for kind, times_ms in kinds.items()
        for name, share in (("p50", 50), ("p99", 99), ("max", 100))
    }
    walked = [each["accepted"] for each in enforced if each["masks_ms"]]
    shares = {"enforced": len(enforced) / len(found), "accepted": sum(walked) / len(walked)}
    return figures | shares


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--model", default=demo_model(), help="a folder with a tokenizer")
    options.add_argument("--peer-python", help="a Python that has XGrammar")
    given = options.parse_args()
    named = {name: json.dumps(schema) for name, schema in make_schemas()}
    job = json.dumps(make_job(given.model, [*named.values()]))
    pythons = {"llguidance": sys.executable, "xgrammar": given.peer_python}
    found = {name: run_library(path, name, job) for name, path in pythons.items() if path}
    for library, each in found.items():
        refused = [name for name, got in zip(named, each, strict=True) if not got]
        print(f"{library} refuses {len(refused)} of {len(named)}: {', '.join(refused)}")
    record = {library: summarize(each) for library, each in found.items()}
    rows = [(name, *row.items()) for name, row in record.items()]
    show(
        "CPU times", ("library", "figure", ""), [(n, k, f"{v:.4g}") for n, *r in rows for k, v in r]
    )
    write(given.json, record)


if __name__ == "__main__":
    main()
