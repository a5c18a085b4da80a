"""Traces: what is read, and the sentence for what cannot be."""

import gzip
from pathlib import Path

import pytest

from simulator.workload.trace import read_lengths, read_trace

ROWS = """\
arrival_s,input_tokens,output_tokens,kind,prompt
3.5,10,20,chat,hello
1.5,30,40,code,"a, b"
"""


def test_trace_is_sorted_and_begins_at_zero(tmp_path: Path):
    path = tmp_path / "small.csv"
    path.write_text(ROWS)
    trace = read_trace(path)
    assert trace.name == "small"
    assert trace.arrival_s.tolist() == [0.0, 2.0]
    assert trace.input_tokens.tolist() == [30, 10]
    assert trace.output_tokens.tolist() == [40, 20]
    assert (list(trace.kinds), list(trace.prompts)) == (["code", "chat"], ["a, b", "hello"])


def test_gzip_trace_equals_the_plain_one(tmp_path: Path):
    plain, packed = tmp_path / "t.csv", tmp_path / "t.csv.gz"
    plain.write_text(ROWS)
    packed.write_bytes(gzip.compress(ROWS.encode()))
    one, other = read_trace(plain), read_trace(packed)
    assert one.name == other.name == "t"
    assert one.arrival_s.tolist() == other.arrival_s.tolist()


def test_trace_reads_only_the_first_rows(tmp_path: Path):
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n" + "1,2,3\n" * 5)
    assert len(read_trace(path, 2)) == 2


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "arrival_s,input_tokens\n1,2\n",
            "needs the columns arrival_s, input_tokens, output_t",
        ),
        ("arrival_s,input_tokens,output_tokens\n", "has no rows"),
        ("", "needs the columns .*; it has none"),
        ("arrival_s,input_tokens,output_tokens\n1,2\n", "line 2: 2 of 3 columns"),
        ("arrival_s,input_tokens,output_tokens\n1,2,3\nx,2,3\n", "line 3: arrival_s must be a"),
        ("arrival_s,input_tokens,output_tokens\n1,nan,3\n", "line 2: input_tokens must be a"),
        ("arrival_s,input_tokens,output_tokens\n1,0,3\n", "line 2: input_tokens must be a whole"),
        ("arrival_s,input_tokens,output_tokens\n1,2,3.5\n", "line 2: output_tokens must be a who"),
    ],
)
def test_trace_error_names_file_line_and_column(tmp_path: Path, text: str, says: str):
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        read_trace(path)


def test_trace_refuses_missing_and_broken_files(tmp_path: Path):
    with pytest.raises(ValueError, match="cannot read"):
        read_trace(tmp_path / "none.csv")
    broken = tmp_path / "broken.csv.gz"
    broken.write_bytes(gzip.compress(b"arrival_s,input_tokens,output_tokens\n0,1,1\n")[:-9])
    with pytest.raises(ValueError, match="cannot read"):
        read_trace(broken)
    damaged = bytearray(gzip.compress(b"arrival_s,input_tokens,output_tokens\n0,1,1\n"))
    damaged[12:20] = bytes(8)
    broken.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"broken\.csv\.gz"):
        read_trace(broken)


def test_blank_lines_are_no_rows(tmp_path: Path):
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,input_tokens,output_tokens\n0,1,2\n\n1,3,4\n2,5,6\n")
    assert read_trace(path, 2).output_tokens.tolist() == [2, 4]


def test_trace_of_lengths_needs_no_arrivals(tmp_path: Path):
    path = tmp_path / "lengths.csv"
    path.write_text("output_tokens,input_tokens\n5,6\n7,8\n")
    inputs, outputs = read_lengths(path)
    assert (inputs.tolist(), outputs.tolist()) == ([6, 8], [5, 7])
