"""The coverage of intervals: a quick version of benchmarks/intervals.py."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize(
    "shape, rows, density",
    [("binary", 20, 0.5), ("binary", 200, 0.05), ("sums", 20, 0.5), ("sums", 50, 0.2), ("continuous", 20, 1.0)],
)
def test_the_paired_interval_covers_a_gain_of_zero_in_93_to_97_per_cent(script, shape, rows, density):
    found = script("intervals").coverage(script("intervals").paired_interval, shape, rows, density, 2000, seed=7)
    assert 0.93 <= found <= 0.97


@pytest.mark.parametrize("shape", ["binary", "sums", "continuous"])
def test_where_few_rows_change_the_interval_covers_no_less(script, shape):
    assert script("intervals").coverage(script("intervals").paired_interval, shape, 20, 0.05, 2000, seed=7) >= 0.95


def test_the_simulation_tells_a_method_that_covers_too_little(script):
    def narrow(before, after):  # 1.5 standard errors of a normal distribution hold 86.6 %
        difference = after - before
        half = 1.5 * difference.std(ddof=1) / len(difference) ** 0.5
        return difference.mean() - half, difference.mean() + half

    found = script("intervals").coverage(narrow, "continuous", 200, 1.0, 2000, seed=7)
    assert found == pytest.approx(0.866, abs=0.02)
