"""foretoken's policies on vLLM's engine, beside vLLM's own.

    python -m benchmarks.vllm --peer-python PYTHON_WITH_VLLM [--presets vllm+srtf,…]
        [--factors 0.5,0.9,1.6,3] [--rounds N] [--seconds S] [--quick] [--json FILE]

`benchmarks.overload` with other defaults: the padded demo model in bfloat16, and load factors of
the capacity of vLLM with its own scheduler. Lengths are learned online; only `vllm-priority` knows
true ones. Figures and options are described there.
"""

from benchmarks.overload.__main__ import main, options_parser
from benchmarks.overload.systems import BY_CLASS, INSIDE, PEER
from services.policies.preset import DEFAULT

SYSTEMS = (BY_CLASS, INSIDE + DEFAULT, INSIDE + "srtf", "fcfs", DEFAULT)

if __name__ == "__main__":
    parser = options_parser(__doc__)
    parser.set_defaults(
        padded=True,
        dtype="bfloat16",
        capacity_of=PEER,
        presets=",".join(SYSTEMS),
        factors="0.5,0.9,1.6,3",
    )
    options = parser.parse_args()
    if not options.peer_python:
        parser.error("--peer-python is missing: name a Python with vLLM and foretoken")
    main(options)
