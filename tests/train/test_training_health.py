from spurline.train.metrics.training_health import CLIPPED_LINES, DEAD_STEPS, PATIENCE, TrainingHealth


def told(health, records):
    """(step, warning) for every warning of a run."""
    return [(record["step"], line) for record in records for line in health.check(record)]


def run(num_steps, every=1, **fields):
    """Records of steps 1.. whose fields are values or functions of the step."""
    return [
        {"step": step, **{name: value(step) if callable(value) else value for name, value in fields.items()}}
        for step in range(1, num_steps + 1, every)
    ]


def test_a_sound_run_has_no_warnings():
    records = run(
        300,
        loss=lambda step: 5 / (1 + step / 50) + 0.05 * (step % 3),
        grad_norm=lambda step: 2.0 if step % 7 else 0.5,
        expert_load={"layers.1.moe": [5, 3, 4, 4]},
        routing={"layers.1.moe": {"load": 1.25, "entropy": 0.98, "dead_experts": 0.0}},
        data_wait=0.01,
        step_time=0.5,
    )
    assert told(TrainingHealth(max_grad_norm=1.0, top_k=2), records) == []


def test_an_expert_without_tokens_is_told_once_and_again_when_it_died_again():
    alive = {DEAD_STEPS + 50}
    records = run(3 * DEAD_STEPS, expert_load=lambda step: {"a": [1, 0, 7], "b": [int(step in alive), 0, 0]})
    warnings = told(TrainingHealth(), records)
    assert [step for step, _ in warnings] == [DEAD_STEPS + 1] * 2 + [2 * DEAD_STEPS + 51]
    assert warnings[0][1].startswith(f"a: expert 1 received no token for {DEAD_STEPS} steps. Raise --model.moe.")
    assert warnings[1][1].startswith("b: experts 0, 1, 2 received no token")
    assert warnings[2][1].startswith("b: expert 0 received")


def test_steps_count_not_lines():
    records = run(3 * DEAD_STEPS, every=25, expert_load={"a": [1, 0]})
    assert [step for step, _ in told(TrainingHealth(), records)] == [DEAD_STEPS + 1]


def routing(load, entropy):
    return {"a": {"load": load, "entropy": entropy, "dead_experts": 0.0}}


def test_a_router_collapses_by_entropy_or_by_the_largest_load_there_can_be():
    rows = {"a": [9] * 8}
    by_entropy = run(100, expert_load=rows, routing=routing(load=2.0, entropy=0.4))
    by_load = run(100, expert_load=rows, routing=routing(load=3.7, entropy=0.8))
    ((step, warning),) = told(TrainingHealth(top_k=2), by_entropy)
    assert step == PATIENCE
    assert "collapsing" in warning
    assert "--model.moe.aux_loss_weight" in warning
    assert len(told(TrainingHealth(top_k=2), by_load)) == 1
    assert told(TrainingHealth(top_k=1), by_load) == []  # where one expert could take eight times the mean


def test_a_short_spell_of_uneven_routing_is_normal():
    records = run(100, expert_load={"a": [9] * 8}, routing=lambda step: routing(4.0, 0.3 if step % PATIENCE else 0.9))
    assert told(TrainingHealth(), records) == []


def test_one_expert_or_all_of_them_for_each_token_can_not_collapse():
    assert told(TrainingHealth(top_k=1), run(50, expert_load={"a": [9]}, routing=routing(1.0, 1.0))) == []
    assert told(TrainingHealth(top_k=4), run(50, expert_load={"a": [9] * 4}, routing=routing(1.0, 1.0))) == []


def test_waiting_for_data_is_told_by_its_share():
    records = run(200, step_time=1.0, data_wait=lambda step: 0.3 if step <= 50 or step > 150 else 0.05)
    warnings = told(TrainingHealth(), records)
    assert [line.split(" of their time")[0] for _, line in warnings] == [
        "steps wait for data 30%",
        "steps wait for data 21%",
    ]
    assert warnings[0][0] == PATIENCE


def test_a_jump_of_the_loss_is_told_with_its_step_and_each_episode_once():
    records = run(120, loss=lambda step: 6.0 if step in (60, 61, 90) else 3.0 + 0.05 * (step % 2))
    warnings = told(TrainingHealth(), records)
    assert [step for step, _ in warnings] == [60, 90]
    assert warnings[0][1].startswith("step 60: the loss jumped to 6 from about 3.0")


def test_a_loss_that_is_not_a_number_is_left_to_the_trainer():
    assert told(TrainingHealth(), run(60, loss=lambda step: None if step == 50 else 1.0)) == []


def test_clipping_every_step_is_told_unless_clipping_is_off():
    records = run(3 * CLIPPED_LINES, grad_norm=lambda step: 0.9 if step == CLIPPED_LINES // 2 else 4.0)
    ((step, warning),) = told(TrainingHealth(max_grad_norm=1.0), records)
    assert step == CLIPPED_LINES // 2 + CLIPPED_LINES
    assert "norm 4, --training.max_grad_norm 1)" in warning
    assert told(TrainingHealth(max_grad_norm=0.0), records) == []


def test_dropped_rows_are_told_with_the_factor_that_was_needed():
    def capacity(step):
        return {"layers.1.moe": {"dropped_rows": 1234 * (step > 3), "factor": 1.25, "needed_factor": 1.875}}

    ((step, warning),) = told(TrainingHealth(), run(9, capacity=capacity))
    assert step == 4
    assert warning.startswith("layers.1.moe: 1,234 rows found no place at their expert and were dropped")
    assert "the capacity factor is 1.25, this step needed 1.88" in warning
    assert warning.endswith("Raise --model.moe.capacity_factor, or choose --model.moe.overflow grow")
    ((step, warning),) = told(TrainingHealth(capacity_grows=True), run(9, capacity=capacity))
    assert "--model.moe.overflow grow" not in warning
    assert "this step needed 1.88. It grows at each logged step that needs more" in warning


def test_metrics_of_users_in_the_groups_of_layers_are_left_alone():
    records = run(
        2 * PATIENCE,
        expert_load={"a": [9] * 8},
        routing=routing(load=2.0, entropy=0.4)
        | {"layers.0.attention": {"gate_norm": 1.0, "load": 9.0}, "of_model": 0.7},
        capacity={"layers.0.attention": {"factor": 2.0}, "of_model": 0.7},
    )
    ((_, warning),) = told(TrainingHealth(), records)
    assert warning.startswith("a: the router is collapsing")
    assert told(TrainingHealth(), run(2 * PATIENCE, routing={"b": {"load": 9.0, "entropy": 0.1}})) == []
