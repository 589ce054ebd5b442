from grpo_rl.report.charts import MAX_POINTS, columns_of, curves


def test_a_long_run_is_averaged_in_bins():
    run = columns_of([{"step": i, "lr": float(i), "lucky": 1.0} for i in range(1, 2 * MAX_POINTS + 1)])
    assert len(run["step"]) == MAX_POINTS and run["step"][:2] == [2, 4] and run["step"][-1] == 2 * MAX_POINTS
    assert run["columns"]["lr"]["values"][:2] == [1.5, 3.5]


def test_time_and_tokens_add_up_over_steps():
    step = {"time/sample_s": 2.0, "time/train_s": 3.0, "throughput/train_tokens_per_s": 100.0}
    run = columns_of([{"step": 0, "eval/reward": 1.0}, {"step": 1, **step}, {"step": 2, **step}])
    assert run["time"] == [0, 5, 10] and run["tokens"] is None
    evaluated = {"step": 2, **step, "time/evaluate_s": 70.0, "time/at_s": 900.0, "time": 1.8e9}
    run = columns_of([{"step": 1, **step, "total/trained_tokens": 250.0}, evaluated | {"total/trained_tokens": 580.0}])
    assert run["time"] == [5, 10] and run["tokens"] == [250, 580]  # as counted, not as rates say
    assert not {"time", "time/at_s"} & set(run["columns"])
    assert columns_of([{"step": 1, **step}, {"step": 2, "lr": 1.0}])["time"] is None


def test_every_metric_is_drawn_once_and_a_staleness_of_zero_not_at_all():
    names = ["reward/mean", "reward/correctness", "my/own", "odd", "staleness/mean", "staleness/max", "time/train_s"]
    drawn = curves({"run": [{"step": 1} | dict.fromkeys(names, 0.0)]})["charts"]
    series = [metric for chart in drawn for metric, *_ in chart["series"]]
    assert sorted(series) == sorted(set(names) - {"staleness/mean", "staleness/max"})
    assert [chart["title"] for chart in drawn if chart["group"] == "Everything else"] == ["my", "Counters"]


def test_runs_are_drawn_in_one_chart_a_metric():
    step = {"loss/total": 1.0, "loss/kl": 0.1}
    drawn = curves({"a": [{"step": 1, **step}], "b": [{"step": 1, **step, "lr": 1.0}]})["charts"]
    assert [(chart["title"], chart["series"]) for chart in drawn] == [
        ("Loss: total", [["loss/total", "a", 0, 0], ["loss/total", "b", 1, 1]]),
        ("Loss: kl", [["loss/kl", "a", 0, 0], ["loss/kl", "b", 1, 1]]),
        ("Learning rate", [["lr", "b", 1, 1]]),
    ]


def test_other_tasks_have_a_chart_each_and_lengths_and_errors_stand_apart():
    names = ["eval/reward", "eval/correct", "eval/pass@4", "eval/accuracy", "eval/standard_error", "eval/measure/words"]
    names += ["eval/mean_length", "eval/math/reward", "eval/math/pass@4", "eval/math/mean_length", "eval/math/correct"]
    drawn = curves({"run": [{"step": 0} | dict.fromkeys(names, 0.0)]})["charts"]
    assert {chart["title"]: [metric for metric, *_ in chart["series"]] for chart in drawn} == {
        "Held-out reward": ["eval/reward"],
        "Held-out problems solved": ["eval/pass@4", "eval/accuracy"],
        "Held-out parts": ["eval/correct"],
        "Held-out measures outside the reward": ["eval/measure/words"],
        "Held-out: math": ["eval/math/reward", "eval/math/pass@4", "eval/math/correct"],
        "Standard error of the held-out reward": ["eval/standard_error"],
        "Held-out response length": ["eval/mean_length", "eval/math/mean_length"],
    }
