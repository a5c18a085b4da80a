"""The simulator's commands report every mistake in one sentence, with status 2."""

import random
import sys
from pathlib import Path

import pytest

from foretoken.__main__ import main
from tests.simulator.fixtures import random_workload, settings
from tests.simulator.twin.twin_fixtures import write_simulated

TRACE = "arrival_s,input_tokens,output_tokens\n"
LOG = "input_tokens,output_tokens,scheduled_s,first_token_s,last_token_s\n"
STEPS = "prefill_tokens,decode_seqs,context_tokens,elapsed_s\n"
USAGE = '{"created": %s, "usage": {"prompt_tokens": %s, "completion_tokens": 20}}\n'
FILES = {
    "ok.csv": TRACE + "0,10,5\n1,20,5\n",
    "burst.csv": TRACE + "0,10,5\n0,20,5\n",
    "wrong.csv": "a,b\n1,2\n",
    "empty.csv": "",
    "header.csv": TRACE,
    "short.csv": TRACE + "0,10\n",
    "nan.csv": TRACE + "nan,10,5\n",
    "negative.csv": TRACE + "0,-10,5\n",
    "fraction.csv": TRACE + "0,10,5.5\n",
    "huge.csv": TRACE + "0,1e30,5\n",
    "far.csv": TRACE + "0,10,5\n1e300,20,5\n",
    "far_apart.csv": TRACE + "-1.7e308,10,5\n1.7e308,20,5\n",
    "bad.toml": "x = [\n",
    "negative.toml": "[cost]\nbase_s = -1\n",
    "far.jsonl": USAGE % (1, 50) + USAGE % (1e300, 50),
    "good.jsonl": USAGE % (1, 50),
    "nan.jsonl": USAGE % ("NaN", 50),
    "negative.jsonl": USAGE % (1, -50),
    "text.jsonl": "hello\n",
    "unfinished.jsonl": '{"created": 1}\n',
    "nan_log.csv": LOG + "1,5,0,nan,2\n",
    "negative_steps.csv": STEPS + "10,0,0,-1\n",
    "one_step.csv": STEPS + "10,0,0,1\n",
}
D1 = "simulate --workload d1 --requests 3 --preset fcfs --predictor history --processes 1"
RATED = f"{D1} --rate 1"
PLAN = "plan --preset fcfs --predictor history --processes 1 --sla ttft=1s"
CALIBRATE = "calibrate --name gpu --log"
OUT = "--out gpu.toml"
STEPS_OUT = f"{CALIBRATE} steps.csv {OUT} --kv-tokens 1000"
TABLE1 = "reproduce past-future-table1"

CASES = [
    # Traffic
    ("simulate", "give --trace FILE or --workload NAME"),
    ("simulate --trace none.csv", "cannot read none.csv: No such file or directory"),
    ("simulate --trace folder", "cannot read folder: Is a directory"),
    ("simulate --trace wrong.csv", "wrong.csv needs the columns arrival_s, input_tokens"),
    ("simulate --trace empty.csv", "empty.csv needs the columns"),
    ("simulate --trace header.csv", "header.csv has no rows"),
    ("simulate --trace short.csv", "short.csv, line 2: 2 of 3 columns"),
    ("simulate --trace nan.csv", "line 2: arrival_s must be a number, got 'nan'"),
    ("simulate --trace negative.csv", "input_tokens must be a whole number from 1 to"),
    ("simulate --trace fraction.csv", "output_tokens must be a whole number from 1 to"),
    ("simulate --trace huge.csv", "input_tokens must be a whole number from 1 to"),
    ("simulate --trace far.csv", "far: the last request arrives after 1e+300 s, and a simulation"),
    ("simulate --trace far_apart.csv", "far_apart: the last request arrives after inf s"),
    (f"{PLAN} --trace far.csv", "covers 315,360,000 s (10 years): give arrival times in seconds"),
    (f"{D1} --rate 1e-6 --requests 1000", "fewer requests or a higher rate"),
    ("simulate --trace ok.csv --requests -1", "'--requests'"),
    (f"{RATED} --requests 1000000000000", "'--requests'"),
    ("simulate --workload d9 --rate 1", "unknown workload 'd9'"),
    ("simulate --workload folder --rate 1", "cannot read folder"),
    ("simulate --workload wrong.csv --rate 1", "needs the columns input_tokens, output_tokens"),
    (f"{D1}", "arrivals poisson need a positive rate, got 0: give a rate, or arrivals burst"),
    (f"{PLAN} --workload d1", "need a positive rate, got 0: give a rate, or arrivals burst"),
    (f"{RATED} --arrivals poison", "unknown arrivals 'poison', did you mean poisson?"),
    *(
        (f"simulate --trace ok.csv --rate {rate}", f"rate must be a positive number, got {rate}")
        for rate in ("0", "-1", "nan", "inf")
    ),
    ("simulate --trace ok.csv --rate 1e-300", "rate must be at least 1e-06, got 1e-300"),
    ("simulate --trace ok.csv --rate 1e10", "rate must be at most 1,000,000,000, got 1e+10"),
    (f"{PLAN} --workload d1 --rate 1e-300", "rate must be at least 1e-06, got 1e-300"),
    # Options that exclude each other
    ("simulate --trace ok.csv --workload d1", "give either --trace or --workload"),
    ("simulate --trace ok.csv --arrivals even", "give either --trace or --arrivals"),
    ("simulate --trace ok.csv --clients 2 --rate 3", "give either --clients or --rate"),
    (f"{D1} --clients 2 --arrivals even", "give either --clients or --arrivals"),
    (f"{RATED} --arrivals burst", "arrivals burst come all at once and have no rate"),
    ("simulate --trace burst.csv --rate 2", "all requests arrive at once"),
    ("simulate --trace burst.csv --sweep rate=2", "all requests arrive at once"),
    (f"{RATED} --sweep rate=2", "give either --rate or --sweep rate=…"),
    (f"{RATED} --workers 1 --sweep workers=2", "give either --workers or --sweep workers=…"),
    (f"{RATED} --max-tokens 9 --sweep max_tokens=2", "give either --max-tokens or --sweep"),
    (f"{RATED} --sweep clients=2", "give either --clients or --rate"),
    (f"{D1} --clients 2 --sweep rate=2", "give either --clients or --rate"),
    # What is simulated
    (f"{RATED} --hardware h100", "unknown hardware 'h100'"),
    (f"{RATED} --hardware none.toml", "cannot read none.toml"),
    (f"{RATED} --hardware bad.toml", "bad.toml is not TOML"),
    (f"{RATED} --hardware negative.toml", "cost.base_s should be greater"),
    (f"{RATED} --preset fcsf", "unknown policy 'fcsf', did you mean fcfs?"),
    (f"{RATED} --preset fcfs,", "unknown policy ''"),
    (f"{RATED} --preset fcfs,fcfs", "--preset fcfs,fcfs: fcfs is named twice"),
    (f"{RATED} --predictor histroy", "unknown predictor 'histroy', did you mean history?"),
    (f"{RATED} --predictor words", "'words' reads prompts, and d1 has none"),
    (f"{RATED} --sla tftt=1s", "sla: unknown budget 'tftt'"),
    (f"{RATED} --sla ttft=nan", "sla: 'ttft=nan' is not a budget"),
    (f"{RATED} --sla ttft=1s,p=99", "sla: p=99 belongs to `foretoken plan`"),
    (f"{RATED} --workers 0", "'--workers'"),
    (f"{RATED} --workers 5000", "workers must be at most 1,024"),
    (f"{RATED} --sweep workers", "--sweep workers: use KEY=A,B,…"),
    (f"{RATED} --sweep workers=", "--sweep workers=: use KEY=A,B,…"),
    (f"{RATED} --sweep =1", "unknown sweep key ''"),
    (f"{RATED} --sweep worker=1", "unknown sweep key 'worker', did you mean workers?"),
    (f"{RATED} --sweep workers=1,nan", "workers must be a positive number, got nan"),
    (f"{RATED} --sweep workers=-1", "workers must be a positive number, got -1"),
    (f"{RATED} --sweep workers=1.5", "workers must be a whole number, got 1.5"),
    (f"{RATED} --sweep workers=1e9", "workers must be at most 1,024"),
    ("simulate --trace ok.csv --sweep rate=1e-20", "rate must be at least 1e-06, got 1e-20"),
    ("simulate --trace ok.csv --sweep rate=1e-309", "rate must be at least 1e-06, got 1e-309"),
    ("simulate --trace ok.csv --sweep rate=1e10", "rate must be at most 1,000,000,000"),
    (f"{RATED} --sweep kv_tokens=1e12", "kv_tokens must be at most 134,217,728 (8,388,608 blocks"),
    (f"{RATED} --sweep kv_tokens=8", "kv_tokens must be at least a block"),
    (f"{RATED} --sweep preset.watermark=nan", "preset.watermark must lie in"),
    (f"{RATED} --sweep preset.x=1", "unknown preset key 'x'"),
    (f"{RATED} --sweep preset.predictor=1", "preset.predictor is a choice, not a number: sweep"),
    (f"{RATED} --sweep preset.order=1", "preset.order is a choice, not a number: sweep"),
    (f"{RATED} --jsn x", "unknown option --jsn, did you mean --json?"),
    # Results
    (f"{RATED} --json nowhere/x.json", "cannot write nowhere/x.json: the folder nowhere does not"),
    (f"{RATED} --json folder", "cannot write folder: it is a folder"),
    (f"{RATED} --json /dev/full", "cannot write /dev/full: "),
    (f"{RATED} --json x --html x", "cannot write x: it is also another output"),
    (f"{RATED} --hardware bad.toml --json bad.toml", "cannot write bad.toml: it is also an input"),
    ("simulate --trace ok.csv --json ok.csv", "cannot write ok.csv: it is also an input"),
    ("simulate --workload ok.csv --html ok.csv", "cannot write ok.csv: it is also an input"),
    (f"{RATED} --plot nowhere", "--plot: the folder does not exist"),
    (f"{RATED} --plot ok.csv", "--plot: ok.csv is a file"),
    # Record
    ("record none.jsonl out.csv", "cannot read none.jsonl: No such file or directory"),
    ("record folder out.csv", "cannot read folder: Is a directory"),
    ("record empty.csv out.csv", "empty.csv is not a readable log"),
    ("record text.jsonl out.csv", "text.jsonl is not a readable log"),
    ("record ok.csv out.csv", "ok.csv is not a readable log"),
    ("record unfinished.jsonl out.csv", "unfinished.jsonl has no finished request"),
    ("record nan.jsonl out.csv", "nan is not a time"),
    ("record far.jsonl out.csv", "far: the last request arrives after 1e+300 s"),
    ("record negative.jsonl out.csv", "usage must have prompt_tokens and completion_tokens"),
    ("record good.jsonl good.jsonl", "cannot write good.jsonl: it is also an input"),
    ("record good.jsonl nowhere/out.csv", "the folder nowhere does not exist"),
    ("record good.jsonl folder", "cannot write folder: it is a folder"),
    ("record good.jsonl /dev/full", "cannot write /dev/full: "),
    # Calibrate
    (f"{CALIBRATE} none.csv {OUT}", "cannot read none.csv"),
    (f"{CALIBRATE} folder {OUT}", "cannot read folder"),
    (f"{CALIBRATE} wrong.csv {OUT}", "wrong.csv needs the columns input_tokens"),
    (f"{CALIBRATE} empty.csv {OUT}", "empty.csv needs the columns"),
    (f"{CALIBRATE} nan_log.csv {OUT}", "first_token_s must be a number, got 'nan'"),
    (f"{CALIBRATE} negative_steps.csv {OUT}", "elapsed_s must be more than 0, got '-1'"),
    (f"{CALIBRATE} one_step.csv {OUT} --kv-tokens 1000", "1 steps do not determine"),
    (f"{CALIBRATE} steps.csv {OUT}", "step timings say nothing of memory"),
    (f"{CALIBRATE} steps.csv {OUT} --kv-tokens 5", "memory.kv_tokens is 5, less than one block"),
    (f"{CALIBRATE} steps.csv {OUT} --gpu h200", "--gpu and --model belong together"),
    (f"{STEPS_OUT} --gpu h20 --model llama3-8b", "unknown gpu 'h20', did you mean h200?"),
    (f"{STEPS_OUT} --gpu h200 --model llama", "unknown model 'llama'"),
    (f"{STEPS_OUT} --tensor-parallel 2", "--tensor-parallel needs --gpu and --model"),
    (
        f"{STEPS_OUT} --gpu h200 --model llama3-70b --kv-tokens 0",
        "on 1 GPU of 140.4 GiB leave no room for KV; raise --tensor-parallel",
    ),
    (f"{STEPS_OUT} --kv-tokens -1", "'--kv-tokens'"),
    (f"{STEPS_OUT} --kv-tokens 99999999999999999999", "memory.kv_tokens must be at most 134,217,"),
    (f"{STEPS_OUT} --host-tokens 99999999999999999999", "memory.host_tokens must be at most 134,"),
    (f"{STEPS_OUT} --max-running 99999999999999999999", "engine.max_running should be less than"),
    (f"{STEPS_OUT} --name=", "--name: the name is empty; say what was measured"),
    (f"{STEPS_OUT} --out gpu.txt", "--out gpu.txt: a hardware file's name ends in .toml"),
    (f"{STEPS_OUT} --out nowhere/gpu.toml", "the folder nowhere does not exist"),
    # Reproduce
    ("reproduce past-future-tabel1", "did you mean past-future-table1?"),
    ("reproduce --json x.json", "name a table to reproduce"),
    (f"{TABLE1} --rows nothing", "--rows: no row contains 'nothing'"),
    (f"{TABLE1} --json nowhere/x.json", "the folder nowhere does not exist"),
    (f"{TABLE1} --lengths folder", "--lengths: past-future-table1 reads no files of lengths"),
    (f"{TABLE1} --requests -1", "'--requests'"),
    (f"{TABLE1} --requests 1000000000000", "'--requests'"),
    # Plan
    ("plan --trace ok.csv", "Missing option '--sla'"),
    (PLAN, "give --trace FILE or --workload NAME"),
    (f"{PLAN} --trace none.csv", "cannot read none.csv"),
    (f"{PLAN} --trace ok.csv --workload d1", "give either --trace or --workload"),
    (f"{PLAN} --trace ok.csv --arrivals even", "give either --trace or --arrivals"),
    (f"{PLAN} --trace ok.csv --rate 0", "rate must be a positive number"),
    (f"{PLAN} --workload d1 --rate 1 --arrivals burst", "arrivals burst come all at once"),
    (f"{PLAN} --trace ok.csv --sla p=99", "sla: give a budget"),
    (f"{PLAN} --trace ok.csv --sla ttft=1s,p=0.99", "'p=0.99' is not a percentage"),
    (f"{PLAN} --trace ok.csv --hardware h100-llama3-8b,", "unknown hardware ''"),
    (f"{PLAN} --trace ok.csv --preset fcfs,fcsf", "unknown policy 'fcsf'"),
    (f"{PLAN} --trace ok.csv --preset fcfs,fcfs", "--preset fcfs,fcfs: fcfs is named twice"),
    (f"{PLAN} --trace ok.csv --predictor x", "unknown predictor 'x'"),
    (f"{PLAN} --trace ok.csv --max-workers 0", "'--max-workers'"),
    (f"{PLAN} --trace ok.csv --max-workers 9999", "workers must be at most 1,024"),
    (f"{PLAN} --trace ok.csv --clients 3", "unknown option --clients"),
    (f"{PLAN} --trace ok.csv --json nowhere/x.json", "the folder nowhere does not exist"),
    (f"{PLAN} --trace ok.csv --json ok.csv", "cannot write ok.csv: it is also an input"),
    (f"{PLAN} --trace ok.csv --json /dev/full", "cannot write /dev/full"),
    # Twin
    ("twin none.log", "cannot read none.log: No such file or directory"),
    ("twin folder", "cannot read folder: Is a directory"),
    ("twin ok.csv", "ok.csv is not a foretoken event log"),
    ("twin events.log --hardware h100", "unknown hardware 'h100'"),
    ("twin events.log --predictor histroy", "unknown predictor 'histroy', did you mean history?"),
    ("twin events.log --predictor nope", "unknown predictor 'nope'; known: history"),
    ("twin events.log --predictor words", "events.log has none: choose a predictor that needs"),
    ("twin events.log --sla ttft=nan", "sla: 'ttft=nan' is not a budget"),
    ("twin events.log --json events.log", "cannot write events.log: it is also an input"),
    ("twin events.log --json x.toml --write-hardware x.toml", "it is also another output"),
    ("twin events.log --write-hardware events.log", "cannot write events.log"),
    ("twin events.log --write-hardware x.txt", "a hardware file's name ends in .toml"),
    ("twin events.log --write-hardware full.toml", "cannot write full.toml: "),
    ("twin events.log --json /dev/full", "cannot write /dev/full: "),
    ("twin events.log --plot nowhere", "--plot: the folder does not exist"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with a file for each mistake."""
    path = tmp_path_factory.mktemp("mistakes")
    (path / "folder").mkdir()
    for name, text in FILES.items():
        (path / name).write_text(text)
    rng = random.Random(1)
    rows = []
    for _ in range(100):
        prefill, seqs, context = (
            rng.choice([0, 64, 128]),
            rng.randint(1, 20),
            rng.randint(10, 5_000),
        )
        elapsed_s = 0.01 + 1e-4 * (prefill + seqs) + 1e-7 * context
        rows.append(f"{prefill},{seqs},{context},{elapsed_s}\n")
    (path / "steps.csv").write_text(STEPS + "".join(rows))
    (path / "full.toml").symlink_to("/dev/full")
    write_simulated(path / "events.log", settings("fcfs"), random_workload(5, 20, 4.0))
    return path


@pytest.mark.parametrize(("words", "sentence"), CASES, ids=[words for words, _ in CASES])
def test_mistake_is_reported_in_one_sentence(
    words: str,
    sentence: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["foretoken", *words.split()])
    before = {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}
    with pytest.raises(SystemExit) as ended:
        main()
    reported = capsys.readouterr().err
    assert ended.value.code == 2
    assert reported.startswith("foretoken: ")
    assert reported.count("\n") == 1
    assert sentence in reported
    assert before == {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


def test_clients_of_0_are_no_closed_loop(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["foretoken", *RATED.split(), "--clients", "0"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith("d1: 3 requests")


def test_variable_with_a_folder_of_lengths_is_no_mistake(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The command gets as far as its rows."""
    monkeypatch.setenv("FORETOKEN_SHARED_DATA", str(folder))
    monkeypatch.setattr(sys, "argv", ["foretoken", *TABLE1.split(), "--rows", "nothing"])
    with pytest.raises(SystemExit):
        main()
    assert "--rows: no row contains 'nothing'" in capsys.readouterr().err
