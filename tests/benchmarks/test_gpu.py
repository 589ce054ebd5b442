"""The rows of benchmarks/gpu.py: a call keeps those of earlier ones."""


def test_a_call_keeps_the_rows_of_earlier_ones(script, tmp_path):
    gpu, out = script("gpu"), tmp_path / "gpu.json"
    gpu.write(out, gpu.ROWS, {"head": gpu.Outcome({"ms": 1.0}, 2.0)}, True, "CPU", {})
    kept = gpu.earlier(out, toy=True)
    assert kept["head"]["figures"] == {"ms": 1.0} and gpu.earlier(out, toy=False) == {}
    later = {"head": gpu.Outcome({}, 0.0, "0 s were left"), "push": gpu.Outcome({"ms": 3.0}, 1.0)}
    gpu.write(out, gpu.ROWS, later, True, "CPU", kept)
    assert {name: row["figures"] for name, row in gpu.earlier(out, toy=True).items()} == {
        "head": {"ms": 1.0},
        "push": {"ms": 3.0},
    }
