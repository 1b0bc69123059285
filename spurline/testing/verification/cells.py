"""Cells: training configurations to verify (parallelism degrees, MoE options, compile, recomputation). Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

from spurline.config import (
    ActivationCheckpoint,
    Compile,
    Debug,
    LRScheduler,
    Optimizer,
    Parallelism,
    Precision,
    RunConfig,
    Training,
)
from spurline.moe.config import SAME_WEIGHTS, MoEConfig
from spurline.parallel.degrees import degree_problems
from spurline.testing import stand_ins
from spurline.testing.tiny import tiny_model

NUM_STEPS = 2
SEQUENCES_A_STEP = 8
# Below any initial gradient norm, so that clipping always takes effect.
CLIP_NORM = 1e-2

TINY_MODEL = tiny_model(vocab_size=32, num_layers=2, q_lora_rank=12, v_head_dim=8, moe={"check_exchange": True})

# MoE options that cells vary: field of Cell -> value -> options. The first value is the default.
MOE_OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "exchange": {
        "uneven": {"equal_split": "off"},
        "adaptive equal split": {"equal_split": "adaptive", "equal_split_threshold": 0.5},
        "equal split": {"equal_split": "forced"},
        "forced balance": {"force_load_balance": True},
    },
    "sent": {"rows sent as they are": {"exchange_dtype": "same"}, "rows sent as float8": {"exchange_dtype": "float8"}},
    "dispatcher": {
        "all-to-all": {"dispatcher": "local"},
        "capacity": {"dispatcher": "capacity", "capacity_factor": 8.0},  # no row is dropped
        "deep_ep stand-in": {"dispatcher": "deep_ep"},
        "hybrid_ep stand-in": {"dispatcher": "hybrid_ep"},
    },
    "rows": {"rows as they are": {"row_multiple": 1}, "aligned rows": {"row_multiple": 8}},
    "num_experts": {f"{number} experts": {"num_experts": number} for number in (8, 6)},
    "experts": {name: {"experts_backend": name} for name in ("loop", "grouped_mm", "bmm", "stream", "triton")},
    "score": {"score after": {"score_before_experts": False}, "score before": {"score_before_experts": True}},
    "router": {
        "softmax": {"score_func": "softmax"},
        "sigmoid": {"score_func": "sigmoid", "route_norm": True, "route_scale": 2.5},
        "groups and bias": {"num_groups": 2, "num_limited_groups": 1, "bias_update_rate": 1e-2},
    },
    "balance": {
        "sequence loss": {"aux_loss": "sequence", "aux_loss_weight": 0.1},
        "batch and z loss": {"aux_loss": "batch", "aux_loss_weight": 0.1, "z_loss_weight": 0.01},
        "no balance loss": {"aux_loss": "none"},
    },
}
AS_GIVEN = ""
"""Value of a Cell field that leaves the model's own MoE options unchanged."""


@dataclass(frozen=True)
class Cell:
    ranks: int = 1
    replicate: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    cp: int = 1
    context: str = "all_gather"
    pp: int = 1
    schedule: str = "1F1B"
    exchange: str = "uneven"
    sent: str = "rows sent as they are"
    dispatcher: str = "all-to-all"
    rows: str = "rows as they are"
    num_experts: str = "8 experts"
    experts: str = "stream"
    score: str = "score after"
    router: str = "softmax"
    balance: str = "sequence loss"
    remat: str = "none"
    compile: str = "off"
    separate_expert_units: bool = False
    micro_batches: int = 1
    dtype: str = "float32"
    precision: str = "none"
    seq_len: int = 12
    clip: bool = False
    num_layers: int = 0
    """Number of layers, for pipeline stages (0: as in the model)."""
    tied: bool = False
    """Whether to tie the embeddings (False: as in the model)."""

    @property
    def dp(self) -> int:
        return self.ranks // (self.pp * self.cp * self.tp)

    @property
    def name(self) -> str:
        """The parallelism degrees above 1, and every setting that is not the default."""
        degrees = {"pp": self.pp, "replicate": self.replicate, "shard": self.dp // self.replicate}
        degrees |= {"cp": self.cp, "tp": self.tp, "ep": self.ep, "etp": self.etp}
        parts = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1]
        parts += [self.schedule] * (self.pp > 1) + [self.context] * (self.context != Cell.context)
        default = Cell()
        values = {field: getattr(self, field) for field in MOE_OPTIONS}
        parts += [value for field, value in values.items() if value not in (getattr(default, field), AS_GIVEN)]
        parts += [f"remat {self.remat}"] * (self.remat != "none") + [self.compile] * (self.compile != "off")
        parts += ["separate expert units"] * self.separate_expert_units
        parts += [f"{self.micro_batches} micro-batches"] * (self.micro_batches > 1)
        parts += [self.dtype] * (self.dtype != default.dtype)
        parts += [self.precision] * (self.precision != default.precision)
        parts += [f"length {self.seq_len}"] * (self.seq_len != default.seq_len) + ["clip"] * self.clip
        parts += [f"{self.num_layers} layers"] * bool(self.num_layers) + ["tied"] * self.tied
        return ", ".join(parts) or "defaults"


def keep_given(cell: Cell, given: set[str]) -> Cell:
    """The cell without changes to the given options of the model."""
    of_model = {"num_layers": ("num_layers", 0), "tied_embeddings": ("tied", False)}
    kept = dict(field for option, field in of_model.items() if option in given)
    as_given: dict[str, Any] = kept | {
        field: AS_GIVEN
        for field, values in MOE_OPTIONS.items()
        if any(option in given for options in values.values() for option in options)
    }
    return replace(cell, **as_given)


def factor_that_drops_nothing(model: Any) -> float | None:
    """The capacity factor that is enough for any routing, E / K; None if the dispatcher has no capacity."""
    moe = getattr(model, "moe", None)
    if not isinstance(moe, MoEConfig) or moe.dispatcher != "capacity":
        return None
    return max(1, moe.num_experts) / max(1, moe.top_k)  # impossible numbers are reported by themselves


def run_config(cell: Cell, model: Any) -> RunConfig[Any]:
    """The trainer's config for this cell."""
    options: dict[str, Any] = {}
    for field, values in MOE_OPTIONS.items():
        options |= values.get(getattr(cell, field), {})
    if options:
        model = replace(model, moe=replace(model.moe, **options))
    if cell.num_layers:
        model = replace(model, num_layers=cell.num_layers)
    if cell.tied:
        model = replace(model, tied_embeddings=True)
    config: RunConfig[Any] = RunConfig(
        model=model,
        training=Training(
            steps=NUM_STEPS,
            seq_len=_seq_len(cell, model),
            local_batch_size=SEQUENCES_A_STEP // (cell.dp * cell.micro_batches),
            global_batch_size=SEQUENCES_A_STEP,
            dtype=cell.dtype,  # type: ignore[arg-type]
            max_grad_norm=CLIP_NORM if cell.clip else 0.0,
            threads=1,
        ),
        # With a large eps the update is a smooth function of the gradient and of its scale. With a small one the first
        # update is the gradient's sign: rounding would flip some entries, and a wrong scale would go unnoticed.
        optimizer=Optimizer(lr=1e-2, eps=1e-2),
        lr_scheduler=LRScheduler(warmup_steps=0, decay_ratio=0.0),
        parallelism=Parallelism(
            cell.replicate,
            -1,
            cell.tp,
            cell.ep,
            cell.etp,
            context_parallel_degree=cell.cp,
            context_parallel_kind=cell.context,  # type: ignore[arg-type]
            pipeline_parallel_degree=cell.pp,
            pipeline_parallel_schedule=cell.schedule,  # type: ignore[arg-type]
        ),
        compile=Compile(enable=cell.compile != "off", backend=cell.compile),
        precision=Precision(recipe=cell.precision),  # type: ignore[arg-type]
        activation_checkpoint=ActivationCheckpoint(mode=cell.remat),  # type: ignore[arg-type]
        debug=Debug(separate_expert_units=cell.separate_expert_units),
    )
    moves_bias = getattr(getattr(model, "moe", None), "bias_update_rate", 0.0) > 0
    if rounding(config) == "float32" or not moves_bias:
        return config
    # Cells in lower precision than the reference are compared before a selection bias is updated. The update is the
    # sign of a row count, so a single row that rounding routes differently changes it.
    return replace(config, training=replace(config.training, steps=1))


def rounding(config: RunConfig[Any]) -> str:
    """The least precise format that a step uses: float32, bfloat16 or 8 bits."""
    moe = getattr(config.model, "moe", None)
    sends_float8 = isinstance(moe, MoEConfig) and moe.exchange_dtype == "float8"
    if config.precision.recipe != "none" or (sends_float8 and config.parallelism.expert_parallel_degree > 1):
        return "8 bits"
    return config.training.dtype


def _seq_len(cell: Cell, model: Any) -> int:
    """Sequence length; forced balance assigns experts by token index per rank, which here matches a single rank."""
    num_experts = model.parallel_facts().num_experts
    if num_experts and model.with_forced_balance() == model:
        return num_experts * cell.tp * (2 * cell.cp if cell.cp > 1 else 1)
    return cell.seq_len


def reference_config(config: RunConfig[Any], micro_batches: int = 1) -> RunConfig[Any]:
    """The same training on one rank, with defaults for every option that must not change the results.

    The batch balance loss is computed per micro-batch over all ranks, so the reference has as many micro-batches.
    """
    model, moe = config.model, getattr(config.model, "moe", None)
    if isinstance(moe, MoEConfig):
        default = MoEConfig()
        model = replace(model, moe=replace(moe, **{name: getattr(default, name) for name in SAME_WEIGHTS}))
    if not isinstance(moe, MoEConfig) or moe.aux_loss != "batch":
        micro_batches = 1
    return replace(
        config,
        model=model,
        training=replace(config.training, local_batch_size=SEQUENCES_A_STEP // micro_batches, dtype="float32"),
        parallelism=Parallelism(),
        compile=Compile(),
        precision=Precision(),
        activation_checkpoint=ActivationCheckpoint(),
        debug=Debug(),
    )


def computes_experts_as_a_whole(experts_backend: str) -> bool:
    """Whether a kernel, which may be the user's, has no matmul whose operands could be rounded."""
    if experts_backend in ("auto", "loop", "grouped_mm", "bmm"):
        return False
    if experts_backend in ("stream", "triton"):
        return True
    from spurline.moe.kernels.choose import kernel_named

    return not kernel_named(experts_backend).multiplies


def cell_problems(cell: Cell, model: Any) -> list[str]:
    """Why this model can't be trained or compared in this cell; empty if it can."""
    found: list[str] = []
    if SEQUENCES_A_STEP % (cell.dp * cell.micro_batches):
        found.append(
            f"{SEQUENCES_A_STEP} sequences can't be split into {cell.micro_batches} micro-batches on {cell.dp} ranks"
        )
        return found
    config = run_config(cell, model)
    with stand_ins.installed():
        found += config.problems()
    moe = getattr(config.model, "moe", None)
    if isinstance(moe, MoEConfig):
        if moe.experts_backend == "bmm" and not (moe.force_load_balance and cell.compile == "off"):
            found.append("experts_backend bmm needs forced balance, without compile")
        if cell.precision != "none" and not found and computes_experts_as_a_whole(moe.experts_backend):
            found.append(f"experts_backend {moe.experts_backend} does not round operands, as {cell.precision} does")
        if moe.experts_backend == "triton" and find_spec("triton") is None:
            found.append("experts_backend triton needs Triton (pip install 'spurline[triton]')")
        if moe.experts_backend == "bmm" and not moe.can_compile:
            found.append(f"experts_backend bmm needs equal row counts, which dispatcher {moe.dispatcher} does not know")
        is_uneven = config.training.seq_len % (cell.tp * (2 * cell.cp if cell.cp > 1 else 1))
        if moe.dispatcher == "hybrid_ep" and cell.ep * cell.etp > 1 and is_uneven:
            found.append("dispatcher hybrid_ep needs the same number of tokens on every rank")
        if moe.dispatcher == "hybrid_ep" and moe.num_experts * cell.etp % 4:
            found.append("dispatcher hybrid_ep needs experts in multiples of 4")
    if not found:
        found = degree_problems(config.parallelism, cell.ranks, model=config.model, training=config.training)
    return [problem.partition("; nearest that works")[0] for problem in found]
