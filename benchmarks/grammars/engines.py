"""Compiles schemas and fills masks with one library: `python engines.py LIBRARY < JOB` prints JSON.
Needs only that library, so that it runs in a peer's environment. Times are of the CPU, in ms."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

Step = Callable[[int], bool]  # takes the next token; whether it is allowed
Compile = Callable[[str], tuple[Callable[[], object], Step]]  # also returns what fills the mask


def _llguidance(job: Mapping[str, Any]) -> Compile:
    from llguidance import LLMatcher, LLTokenizer

    from gateway.grammars.compiling.compilation import compile_constraint
    from gateway.types.constraint import Constraint, ConstraintKind

    tokenizer = LLTokenizer(job["tokenizer"], eos_token=job["eos_ids"])

    def compile_schema(schema: str) -> tuple[Callable[[], object], Step]:
        constraint = Constraint(ConstraintKind.JSON_SCHEMA, schema)
        matcher = LLMatcher(tokenizer, compile_constraint(constraint, tokenizer), log_level=0)
        return matcher.compute_bitmask, matcher.consume_token

    return compile_schema


def _xgrammar(job: Mapping[str, Any]) -> Compile:
    import xgrammar as library  # type: ignore[import-not-found]  # only in its own environment

    vocabulary = [bytes.fromhex(each) for each in job["vocabulary"]]
    info = library.TokenizerInfo(vocabulary, stop_token_ids=job["eos_ids"])
    compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    mask = library.allocate_token_bitmask(1, info.vocab_size)

    def compile_schema(schema: str) -> tuple[Callable[[], object], Step]:
        matcher = library.GrammarMatcher(compiler.compile_json_schema(schema))
        return lambda: matcher.fill_next_token_bitmask(mask), matcher.accept_token

    return compile_schema


LIBRARIES = {"llguidance": _llguidance, "xgrammar": _xgrammar}


def measure(compile_schema: Compile, schema: str, answer: list[int]) -> dict[str, Any] | None:
    """None if the schema is refused."""
    began_s = time.process_time()
    try:
        fill, step = compile_schema(schema)
    except Exception:  # each library has its own
        return None
    fill()
    compile_ms, masks_ms, accepted = (time.process_time() - began_s) * 1e3, [], True
    for token in answer:
        began_s = time.process_time()
        fill()
        masks_ms.append((time.process_time() - began_s) * 1e3)
        if not (accepted := step(token)):
            break
    return {"compile_ms": compile_ms, "masks_ms": masks_ms, "accepted": accepted}


if __name__ == "__main__":
    given = json.load(sys.stdin)
    compiling = LIBRARIES[sys.argv[1]](given)
    pairs = zip(given["schemas"], given["answers"], strict=True)
    print(json.dumps([measure(compiling, *pair) for pair in pairs]))
