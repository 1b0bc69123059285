import base64

from spurline.report import charts
from spurline.report.charts import draw_curves, draw_heat, draw_time
from spurline.report.page import make_page
from spurline.report.read import Run, cleaned


def run_of(*records):
    return Run("run", [{"step": step, **record} for step, record in enumerate(records, 1)], {}, [])


def chart(runs, key):
    (found,) = [chart for chart in draw_curves(runs) if chart["key"] == key]
    return found


def test_charts_without_a_value_are_left_out():
    assert [chart["key"] for chart in draw_curves([run_of({"loss": 1.0, "balance_loss": None})])] == ["loss"]
    assert draw_curves([run_of({"loss": None})]) == []


def test_validation_has_points_only_where_it_was_measured_and_the_loss_keeps_gaps():
    run = run_of({"loss": 3.0}, {"loss": None, "validation_loss": 2.5}, {"loss": 2.0})
    training, validation = chart([run], "loss")["series"]
    assert (training["x"], training["y"]) == ([1, 2, 3], [3.0, None, 2.0])
    assert (validation["x"], validation["y"]) == ([2], [2.5])


def test_every_run_has_a_series():
    series = chart([run_of({"lr": 0.1}), run_of({"loss": 1.0}), run_of({"lr": 0.2})], "lr")["series"]
    assert [(one["run"], one["y"]) for one in series] == [(0, [0.1]), (2, [0.2])]


def test_memory_is_in_gigabytes():
    assert chart([run_of({"peak_memory_bytes": 2_500_000_000})], "memory")["series"][0]["y"] == [2.5]


def test_the_busiest_expert_is_that_of_the_worst_layer_and_idle_ones_are_of_all():
    run = run_of(cleaned({"expert_load": {"a": [2, 2], "b": [0, 4], "c": [0, 0]}}))
    assert chart([run], "load")["series"][0]["y"] == [2.0]
    assert chart([run], "dead")["series"][0]["y"] == [3.0]


def test_entropy_is_that_of_the_lowest_layer():
    run = run_of({"routing": {"a": {"entropy": 0.9}, "b": {"entropy": 0.4}}})
    assert chart([run], "entropy")["series"][0]["y"] == [0.4]


def test_parts_of_a_steps_time_are_in_milliseconds_and_in_their_own_order():
    run = run_of({"loss": 1.0}, {"step_time_parts": {"other": 0.5, "forward": 1.0, "mine": 0.25, "data": 0.125}})
    time = draw_time(run)
    assert time["x"] == [2]
    assert [(part["name"], part["y"]) for part in time["parts"]] == [
        ("data", [125.0]),
        ("forward", [1000.0]),
        ("other", [500.0]),
        ("mine", [250.0]),
    ]
    assert draw_time(run_of({"loss": 1.0})) is None


def ratios(map_):
    """[column][expert]: rows over the mean."""
    cells = [(byte / 32) ** 2 for byte in base64.b64decode(map_["cells"])]
    return [cells[start : start + map_["experts"]] for start in range(0, len(cells), map_["experts"])]


def test_heat_maps_have_the_load_of_each_expert_in_each_column():
    run = run_of({"expert_load": {"a": [4, 0], "b": [1, 1, 1]}}, {"expert_load": {"a": [2, 2], "b": [3, 0, 0]}})
    a, b = draw_heat([run])
    assert (a["layer"], a["run"], a["experts"], a["x"], a["last"]) == ("a", 0, 2, [1, 2], 2)
    assert [[round(ratio, 1) for ratio in column] for column in ratios(a)] == [[2.0, 0.0], [1.0, 1.0]]
    assert [[round(ratio, 1) for ratio in column] for column in ratios(b)] == [[1.0] * 3, [3.0, 0.0, 0.0]]


def test_an_expert_with_few_rows_does_not_look_dead():
    (map_,) = draw_heat([run_of({"expert_load": {"a": [1_000_000, 1]}})])
    assert base64.b64decode(map_["cells"])[1] == 1


def test_columns_of_long_runs_sum_their_steps_and_stay_within_the_budget(monkeypatch):
    run = run_of(*({"expert_load": {"a": [step % 2, 1 - step % 2]}} for step in range(1000)))
    (map_,) = draw_heat([run])
    assert len(map_["x"]) == charts.HEAT_COLUMNS
    assert all(0.6 < ratio < 1.5 for column in ratios(map_) for ratio in column)
    monkeypatch.setattr(charts, "HEAT_CELLS", 40)
    assert len(draw_heat([run])[0]["x"]) == 20


def test_runs_without_moe_layers_have_no_heat_map():
    assert draw_heat([run_of({"loss": 1.0, "expert_load": {}})]) == []


def test_metrics_that_nothing_knows_are_drawn_by_their_names():
    run = run_of(
        {"loss": 1.0, "tilt": 3.0, "note": "text", "rows": {"a": [1, 2]}},
        {
            "tilt": None,
            "norm": {"a": 1.0, "b": 4.0, "c": 1.0},
            "routing": {"a": {"entropy": 0.5, "gini": 0.25}, "b": {"entropy": 0.5, "load": 1.0}},
        },
    )
    assert [chart["key"] for chart in draw_curves([run])] == ["loss", "entropy", "norm", "routing/gini", "tilt"]
    (tilt,), (gini,) = chart([run], "tilt")["series"], chart([run], "routing/gini")["series"]
    assert (tilt["x"], tilt["y"]) == ([1, 2], [3.0, None])
    assert (gini["y"], chart([run], "routing/gini")["unit"]) == ([None, 0.25], "a")
    assert [(one["label"], one["dashed"], one["y"][1]) for one in chart([run], "norm")["series"]] == [
        ("mean", False, 2.0),
        ("lowest layer", True, 1.0),
        ("highest layer", True, 4.0),
    ]


def test_names_of_metrics_are_escaped_in_the_page():
    page = make_page([run_of({"<i>x</i>": 1.0, "norm": {"<b>": 2.0}})])
    assert "<i>x" not in page
    assert "&lt;i&gt;x&lt;/i&gt;" in page
    assert "<b>" not in page.replace("<b>step", "")
