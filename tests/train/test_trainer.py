"""A step of training against the same step in plain torch, and what it reports.

G sequences a step in micro-batches of B sequences of L tokens; T tokens, E experts, K experts per token.
"""

import copy
import math
import sys
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from spurline.config import Data, LRScheduler, Metrics, Optimizer, RunConfig, Training
from spurline.moe.balance import routers
from spurline.moe.config import MoEConfig
from spurline.testing.params import slow_but
from spurline.testing.tiny import tiny_model, write_words
from spurline.train.loss import IGNORE_INDEX
from spurline.train.sample import sample_text
from spurline.train.trainer import make_trainer
from spurline.train.validation import validate

SEQ_LEN, NUM_EXPERTS, TOP_K = 16, 4, 2
MOE_LAYERS = ["layers.1.moe", "layers.2.moe"]


@pytest.fixture(autouse=True)
def _leave_torch_as_it_was():
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def tiny(tmp_path):
    """Makes the config of a small model with one dense and two MoE layers; sections take dicts of changes."""
    write_words(tmp_path)

    def make(moe=None, **sections):
        experts = MoEConfig(hidden_dim=16, num_experts=NUM_EXPERTS, top_k=TOP_K, num_shared_experts=1)
        model = tiny_model(vocab_size=257, num_heads=2, moe=replace(experts, **(moe or {})))
        config = RunConfig(
            model=model,
            training=Training(steps=8, seq_len=SEQ_LEN, local_batch_size=4, threads=1),
            optimizer=Optimizer(lr=4e-3),
            lr_scheduler=LRScheduler(warmup_steps=4),
            data=Data(path=str(tmp_path), validation_fraction=0.1),
            metrics=Metrics(validation_batches=3, sample_tokens=8, sample_prompt="ten "),
        )
        changed = {name: replace(getattr(config, name), **changes) for name, changes in sections.items()}
        return replace(config, **changed)

    return make


def state_of(trainer):
    return {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}


def assert_same_bits(actual, expected):
    assert actual.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


class PlainTraining:
    """The steps of a run, written with nothing but torch, on a copy of the trainer's model."""

    def __init__(self, trainer, max_grad_norm):
        self.model = copy.deepcopy(trainer.model)
        self.max_grad_norm = max_grad_norm
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=4e-3, betas=(0.9, 0.95), eps=1e-8, fused=False, foreach=False)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda done: min(1.0, (done + 1) / 4))

    def step(self, tokens_BL, labels_BL):
        """Take a step, and return the loss and the gradient's norm before clipping."""
        loss = F.cross_entropy(self.model(tokens_BL).flatten(0, 1), labels_BL.flatten(), ignore_index=IGNORE_INDEX)
        self.optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.max_grad_norm)
        self.optimizer.step()
        self.schedule.step()
        return loss.item(), norm.item()


def test_first_steps_equal_steps_written_by_hand(tiny):
    trainer = make_trainer(tiny(training={"max_grad_norm": 0.5}))
    plain = PlainTraining(trainer, max_grad_norm=0.5)
    for step in (1, 2, 3):
        batch = trainer.data.train.batch((step - 1) * 4, 4)
        loss, norm = plain.step(batch.tokens_BL, batch.labels_BL)
        metrics = trainer.step(step)
        record = metrics.read()
        assert record["step"] == step
        assert record["loss"] == pytest.approx(loss, abs=1e-6)
        assert record["grad_norm"] == pytest.approx(norm, abs=1e-6)
        assert norm > 0.5, "the gradient has to be clipped for this test to mean something"
        assert record["lr"] == pytest.approx(4e-3 * step / 4)
        assert metrics.num_tokens == 4 * SEQ_LEN
        for (name, actual), expected in zip(trainer.model.named_parameters(), plain.model.parameters(), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


def test_gradient_is_left_alone_where_clipping_is_off(tiny):
    never_clipped, unclipped, clipped = (
        make_trainer(tiny(training={"max_grad_norm": norm})) for norm in (0.0, 1e9, 0.5)
    )
    records = [trainer.step(1).read() for trainer in (never_clipped, unclipped, clipped)]
    assert_same_bits(state_of(never_clipped), state_of(unclipped))
    assert records[0]["grad_norm"] == records[2]["grad_norm"] > 0.5


@pytest.mark.parametrize("moe", [{}, {"aux_loss": "sequence", "aux_loss_weight": 0.5, "z_loss_weight": 0.1}])
def test_accumulation_changes_neither_the_data_nor_the_step(tiny, moe):
    orders, records, states = [], [], []
    for size in (8, 4, 1):
        sizes = {"local_batch_size": size, "global_batch_size": 8}
        trainer = make_trainer(tiny(moe={**moe, "bias_update_rate": 1e-3}, training=sizes))
        orders.append([torch.cat([batch.tokens_BL for batch in trainer.micro_batches(step)]) for step in (1, 2, 3)])
        shapes = [tuple(batch.tokens_BL.shape) for batch in trainer.micro_batches(1)]
        assert shapes == [(size, SEQ_LEN)] * (8 // size)
        records.append([trainer.step(step).read() for step in (1, 2, 3)])
        states.append(state_of(trainer))
    for order, steps, state in zip(orders[1:], records[1:], states[1:], strict=True):
        assert torch.equal(torch.stack(order), torch.stack(orders[0]))
        for record, whole in zip(steps, records[0], strict=True):
            assert record["loss"] == pytest.approx(whole["loss"], rel=2e-6)
            assert record["grad_norm"] == pytest.approx(whole["grad_norm"], rel=2e-6)
            assert float(record["balance_loss"]) == pytest.approx(float(whole["balance_loss"]), rel=2e-6)
            assert record["expert_load"] == whole["expert_load"]
        for name, tensor in state.items():
            torch.testing.assert_close(tensor, states[0][name], rtol=0, atol=2e-6)


def test_prefetched_steps_are_those_without_prefetching(tiny):
    sizes = {"local_batch_size": 2, "global_batch_size": 4}
    plain, ahead = make_trainer(tiny(training=sizes)), make_trainer(tiny(training=sizes))
    with ahead.prefetching(range(1, 5)):
        for step in range(1, 5):
            assert ahead.step(step).read() == plain.step(step).read()
    assert_same_bits(state_of(ahead), state_of(plain))
    assert torch.equal(ahead.micro_batches(9)[0].tokens_BL, plain.micro_batches(9)[0].tokens_BL)


def test_steps_take_the_samples_one_after_the_other_from_the_first_on(tiny, monkeypatch):
    trainer = make_trainer(tiny(training={"local_batch_size": 2, "global_batch_size": 6}))
    taken, batch = [], trainer.data.train.batch

    def noted(start, count):
        taken.extend(range(start, start + count))
        return batch(start, count)

    monkeypatch.setattr(trainer.data.train, "batch", noted)
    for step in (1, 2, 3):
        trainer.step(step)
    assert taken == list(range(18))


def with_ignored_labels(batch, num_real):
    """`batch` of a data set, with only the first num_real[g] labels of sequence g of a step left."""

    def masked(start, count):
        whole = batch(start, count)
        labels_BL = whole.labels_BL.clone()
        for row in range(count):
            labels_BL[row, num_real[(start + row) % len(num_real)] :] = IGNORE_INDEX
        return replace(whole, labels_BL=labels_BL)

    return masked


def plain_balance_loss(router, x_TD, num_sequences):
    """Sequence-level balance loss (weight 0.5) and z-loss (weight 0.1) as a sum over tokens, in plain torch."""
    logit_TE = x_TD @ router.gate_ED.T
    score_TE = logit_TE.softmax(-1)
    total = 0.1 * logit_TE.logsumexp(-1).pow(2).sum()
    for score_LE in score_TE.chunk(num_sequences):
        chosen_LE = F.one_hot(score_LE.topk(TOP_K).indices, NUM_EXPERTS).sum(1)
        total = total + 0.5 * NUM_EXPERTS * (chosen_LE.float().mean(0) / TOP_K * score_LE.mean(0)).sum() * SEQ_LEN
    return total


@pytest.mark.parametrize("size", [8, 4, 1])
@pytest.mark.parametrize("with_balance_loss", [False, True])
def test_losses_are_normalised_by_the_real_tokens_of_the_whole_step(tiny, monkeypatch, size, with_balance_loss):
    moe = {"aux_loss": "sequence", "aux_loss_weight": 0.5, "z_loss_weight": 0.1} if with_balance_loss else {}
    sizes = {"local_batch_size": size, "global_batch_size": 8, "max_grad_norm": 0.0}
    trainer = make_trainer(tiny(moe=moe, training=sizes))
    num_real = [16, 1, 0, 3, 16, 16, 9, 0]
    masked = with_ignored_labels(trainer.data.train.batch, num_real)
    monkeypatch.setattr(trainer.data.train, "batch", masked)

    model = make_trainer(tiny(training=sizes)).model  # the same weights, without losses of its own
    router_inputs = {}
    for name, router in routers(model).items():
        router.register_forward_pre_hook(lambda _, args, name=name: router_inputs.update({name: args[0]}))
    batch = masked(0, 8)
    logits_GLV = model(batch.tokens_BL)
    loss = F.cross_entropy(logits_GLV.flatten(0, 1), batch.labels_BL.flatten(), ignore_index=IGNORE_INDEX)
    balance_loss = torch.zeros(())
    if with_balance_loss:
        for name, router in routers(model).items():
            balance_loss = balance_loss + plain_balance_loss(router, router_inputs[name], 8) / sum(num_real)
    (loss + balance_loss).backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()

    metrics = trainer.step(1)
    record = metrics.read()
    assert metrics.num_tokens == sum(num_real)
    assert record["loss"] == pytest.approx(loss.item(), rel=2e-6)
    assert float(record["balance_loss"]) == pytest.approx(balance_loss.item(), rel=1e-5)
    assert record["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)


@pytest.mark.parametrize("size", [4, 2])
def test_expert_load_counts_each_token_of_a_step_once(tiny, size):
    trainer = make_trainer(tiny(training={"local_batch_size": size, "global_batch_size": 4}))
    for step in (1, 2, 3):
        load = trainer.step(step).read()["expert_load"]
        assert list(load) == MOE_LAYERS
        assert [sum(rows) for rows in load.values()] == [4 * SEQ_LEN * TOP_K] * 2


def test_validation_leaves_no_trace_in_the_training(tiny):
    config = tiny(moe={"aux_loss": "sequence", "bias_update_rate": 1e-3})
    with_validation, without = make_trainer(config), make_trainer(config)
    for step in (1, 2, 3):
        validate(with_validation)
        sample_text(with_validation)
        assert with_validation.step(step).read() == without.step(step).read()
    assert_same_bits(state_of(with_validation), state_of(without))


def test_expert_bias_moves_by_its_rate_towards_the_experts_with_less(tiny):
    trainer = make_trainer(tiny(moe={"bias_update_rate": 0.01}))
    layers = routers(trainer.model)
    expected = {name: torch.zeros(NUM_EXPERTS) for name in MOE_LAYERS}
    for step in (1, 2, 3):
        for name, rows in trainer.step(step).read()["expert_load"].items():
            mean = sum(rows) / NUM_EXPERTS
            moves = [0.01 * ((mean > row) - (mean < row)) for row in rows]
            expected[name] += torch.tensor([move - sum(moves) / NUM_EXPERTS for move in moves])
            torch.testing.assert_close(layers[name].expert_bias_E, expected[name])
    assert all(bias_E.any() for bias_E in expected.values())


class ReadsOfTheTrainer(TorchFunctionMode):
    """Notes each read of a tensor on the host that a function of the trainer or of the metrics makes itself."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = getattr(function, "__name__", "")
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if name in ("item", "tolist", "__bool__", "__int__", "__float__") and caller.startswith(
            ("spurline.train", "spurline.comm.metrics", "spurline.moe.metrics", "spurline.moe.balance")
        ):
            self.names.append(name)
        return function(*args, **(kwargs or {}))


class ReadsOfOps(TorchDispatchMode):
    """Counts what ops read on the host; the ops inside a registered one are its own matter."""

    count = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.count += op in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_step_reads_nothing_and_all_metrics_at_once_when_it_is_logged(tiny, optimizer):
    sizes = {"local_batch_size": 1, "global_batch_size": 4}
    moe = {"aux_loss": "sequence", "bias_update_rate": 1e-3, "experts_backend": "grouped_mm"}
    trainer = make_trainer(tiny(moe=moe, training=sizes, optimizer={"name": optimizer}))
    trainer.step(1)
    with ReadsOfTheTrainer() as reads, ReadsOfOps() as of_ops:
        metrics = trainer.step(2)
        assert (reads.names, of_ops.count) == ([], 0)
        metrics.read()
    assert reads.names == ["tolist"]


def test_seed_decides_weights_and_data_and_nothing_else_does(tiny):
    torch.manual_seed(123)  # whatever happened before in this process
    runs = []
    for seed in (0, 0, 1):
        trainer = make_trainer(tiny(training={"seed": seed}))
        start = state_of(trainer)
        runs.append(
            (start, [trainer.step(step).read() for step in (1, 2, 3)], state_of(trainer), trainer.micro_batches(1))
        )
        torch.rand(7)
    (start, records, end, batches), again, other = runs
    assert_same_bits(again[0], start)
    assert again[1] == records
    assert_same_bits(again[2], end)
    assert not torch.equal(other[0]["output.weight"], start["output.weight"])
    assert not torch.equal(other[3][0].tokens_BL, batches[0].tokens_BL)
    assert other[1][0]["loss"] != records[0]["loss"]


def test_bfloat16_computes_in_bfloat16_and_keeps_parameters_in_float32(tiny):
    trainer = make_trainer(tiny(training={"dtype": "bfloat16"}))
    assert trainer.model(trainer.micro_batches(1)[0].tokens_BL).dtype == torch.bfloat16
    first = trainer.step(1).read()["loss"]
    in_float32 = make_trainer(tiny()).step(1).read()["loss"]
    assert first == pytest.approx(in_float32, rel=2e-3)
    assert first != in_float32
    assert [trainer.step(step).read()["step"] for step in (2, 3)] == [2, 3]
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    moments = [tensor for state in trainer.optimizer.state.values() for tensor in state.values()]
    assert {tensor.dtype for tensor in moments} == {torch.float32}


@torch.no_grad()
def test_validation_loss_is_the_mean_over_held_out_tokens_whatever_the_batches(tiny):
    for size, num_batches in ((4, 100), (3, 2)):
        trainer = make_trainer(tiny(training={"local_batch_size": size}, metrics={"validation_batches": num_batches}))
        batches = list(trainer.data.validation.batches(size, num_batches))
        tokens_NL = torch.cat([batch.tokens_BL for batch in batches])
        labels_NL = torch.cat([batch.labels_BL for batch in batches])
        expected = F.cross_entropy(trainer.model(tokens_NL).flatten(0, 1), labels_NL.flatten()).item()
        assert validate(trainer).loss == pytest.approx(expected, rel=1e-6)
    # The first of the two has a last batch that is smaller, so that a mean of means would differ.
    assert len(trainer.data.validation.windows) % 4


def test_validation_runs_in_eval_mode_without_gradients_and_training_does_not(tiny):
    trainer = make_trainer(tiny())
    seen = []
    trainer.model.register_forward_pre_hook(lambda model, _: seen.append((model.training, torch.is_grad_enabled())))
    validate(trainer)
    trainer.step(1)
    assert seen == [(False, False)] * 3 + [(True, True)]


def test_no_validation_where_nothing_is_held_out_or_none_is_wanted(tiny):
    assert validate(make_trainer(tiny(data={"validation_fraction": 0.0}))) is None
    assert validate(make_trainer(tiny(metrics={"validation_batches": 0}))) is None


def test_sample_follows_the_prompt_and_is_the_same_each_time(tiny):
    trainer = make_trainer(tiny())
    text = sample_text(trainer)
    assert text.startswith("ten ")
    assert len(text) > len("ten ")
    assert sample_text(trainer) == text
    assert trainer.model.training


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_step_that_is_not_finite_is_refused_before_it_reaches_the_weights(tiny, poison):
    trainer = make_trainer(tiny(moe={"bias_update_rate": 1e-3}))
    trainer.step(1)
    with torch.no_grad():
        trainer.model.norm.weight[0] = poison
    before = state_of(trainer)
    trainer.step(2)
    metrics = trainer.step(3)
    with pytest.raises(ValueError, match=r"^step 2: the loss is nan .*lower --optimizer.lr \(now 0.004\)"):
        metrics.read()
    before["norm.weight"][0] = 0
    after = state_of(trainer)
    after["norm.weight"][0] = 0
    assert_same_bits(after, before)
    assert trainer.tally.tokens_seen == 3 * 4 * SEQ_LEN
    with torch.no_grad():
        trainer.model.norm.weight[0] = 1
    assert trainer.step(4).read()["step"] == 4


def test_determinism_is_asked_of_torch_only_where_it_is_wanted(tiny):
    make_trainer(tiny(debug={"deterministic": True})).step(1)
    assert torch.are_deterministic_algorithms_enabled()
    make_trainer(tiny())
    assert not torch.are_deterministic_algorithms_enabled()


def test_threads_are_set_where_they_are_given(tiny):
    make_trainer(tiny(training={"threads": 2}))
    assert torch.get_num_threads() == 2
    make_trainer(tiny(training={"threads": 0}))
    assert torch.get_num_threads() == 2


def num_graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("components", slow_but(["model,loss", "loss"], ["model,loss", "model", "loss"]))
def test_compiled_parts_train_like_eager_ones_without_recompiling(tiny, components):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager = make_trainer(tiny(moe={"aux_loss": "sequence"}))
    trainer = make_trainer(
        tiny(
            moe={"aux_loss": "sequence"},
            compile={"enable": True, "components": components, "backend": "aot_eager"},
        )
    )
    assert state_of(trainer).keys() == state_of(eager).keys()
    is_compiled = [block._compiled_call_impl is not None for block in trainer.model.layers.values()]
    assert is_compiled == [("model" in components)] * 3
    graphs = []
    for step in (1, 2, 3, 4):
        actual, expected = trainer.step(step).read(), eager.step(step).read()
        assert actual["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert actual["grad_norm"] == pytest.approx(expected["grad_norm"], abs=1e-5)
        assert actual["expert_load"] == expected["expert_load"]
        graphs.append(num_graphs())
    # One for each kind of block, one for the loss.
    assert graphs == [2 * ("model" in components) + ("loss" in components)] * 4
    assert validate(trainer).loss == pytest.approx(validate(eager).loss, abs=1e-5)
    after_validation = num_graphs()
    assert sample_text(trainer) == sample_text(eager)
    trainer.step(5)
    assert num_graphs() == after_validation
    torch._dynamo.reset()


def test_compile_without_enable_compiles_nothing(tiny):
    trainer = make_trainer(tiny(compile={"enable": False, "backend": "no_such_backend"}))
    assert all(block._compiled_call_impl is None for block in trainer.model.layers.values())


def test_unknown_compile_backend_is_refused(tiny):
    for components in ("model", "loss"):
        with pytest.raises(ValueError, match=r"^compile.backend: there is no 'aot_eagre'. Choose from: .*inductor"):
            make_trainer(tiny(compile={"enable": True, "components": components, "backend": "aot_eagre"}))
