"""Weights of a Hugging Face folder, read by ranks of any layout: each tensor as a whole, by each rank its part."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from spurline.config import Checkpoint, Data, Job, Metrics, Parallelism, RunConfig, Training
from spurline.hf import safetensors_file
from spurline.hf.loading import FolderWeights
from spurline.hf.settings import read_folder_model
from spurline.parallel.world import joined_world
from spurline.testing import RankError, RankPool
from spurline.testing.draws import CountDraws
from spurline.train.run import train
from spurline.train.setup import build_model

LAYOUTS = {
    "fsdp": Parallelism(),
    "ep 2": Parallelism(expert_parallel_degree=2),
    "tp 2, ep 4": Parallelism(tensor_parallel_degree=2, expert_parallel_degree=4),
    "tp 2, etp 2": Parallelism(tensor_parallel_degree=2, expert_tensor_parallel_degree=2),
    "hsdp": Parallelism(data_parallel_replicate_degree=2),
}


def on_ranks() -> mock._patch_dict:
    return mock.patch.dict(os.environ, {"WORLD_SIZE": str(dist.get_world_size())})


def wrong_tensors(rank: int, folder: Path, expected_file: Path) -> list[str]:
    """The tensors that are not as expected, by layout."""
    expected, wrong = torch.load(expected_file), []
    for layout, parallelism in LAYOUTS.items():
        config = RunConfig(model=read_folder_model(folder).model, parallelism=parallelism)
        with on_ranks(), joined_world(parallelism) as world, CountDraws() as draws:
            model = build_model(config, world, draw_weights=False)
            for tensor in [*model.parameters(), *model.buffers()]:
                (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().fill_(7.0)
            FolderWeights(folder, config.model).load(model)
            assert not draws.num_drawn
            for name, tensor in model.state_dict().items():
                whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if not torch.equal(whole, expected[name]):
                    wrong.append(f"{layout}: {name}")
            assert expected.keys() == model.state_dict().keys()
    return wrong


def made(kind: str, folder: Path) -> Path:
    """A folder of theirs, of which nothing divides evenly."""
    from test_hf_quantized import mxfp4_folder, quantize_folder
    from their_models import make, save

    if kind == "gpt_oss in mxfp4":
        mxfp4_folder(save(make("gpt_oss", intermediate_size=96, hidden_size=64, head_dim=10), folder))
    elif kind == "deepseek_v3 in fp8":
        quantize_folder(save(make("deepseek_v3"), folder), (7, 5))
    else:
        save(make(kind), folder, max_shard_size="60KB")
    return folder


SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_moe-dense-anywhere", "gpt_oss", "qwen2_moe")]


@pytest.mark.parametrize("kind", ["gpt_oss in mxfp4", "deepseek_v3 in fp8", *SLOW])
def test_ranks_of_any_layout_read_what_is_stored(ranks: RankPool, kind: str, tmp_path: Path) -> None:
    from test_hf_training import read_ours

    folder = made(kind, tmp_path / "theirs")
    torch.save(read_ours(folder)[1], tmp_path / "expected.pt")
    assert ranks.run(wrong_tensors, 4, folder, tmp_path / "expected.pt", timeout=240) == [[]] * 4


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    counts: list[int] = []
    real = safetensors_file._read_at

    def read_at(file: object, position: int, target: torch.Tensor) -> None:
        counts.append(target.numel() * target.element_size())
        real(file, position, target)  # type: ignore[arg-type]

    with mock.patch.object(safetensors_file, "_read_at", read_at):
        yield counts


def peak_growth(rank: int, folder: Path) -> tuple[int, int, int]:
    """While a rank loads its weights: how much its memory grows at most, the bytes it holds, the bytes it reads."""
    parallelism = Parallelism(expert_parallel_degree=2)
    config = RunConfig(model=read_folder_model(folder).model, parallelism=parallelism)
    with on_ranks(), joined_world(parallelism) as world:
        model = build_model(config, world, draw_weights=False)
        FolderWeights(folder, config.model, compare_copies=False)  # what is imported and cached is not measured
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far is forgotten
        before = memory("VmRSS")
        with counted_bytes() as counts:
            FolderWeights(folder, config.model, compare_copies=False).load(model)
        tensors = model.state_dict().values()
        held = sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in tensors)
        return memory("VmHWM") - before, held, sum(counts)


def memory(what: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


def test_a_rank_takes_the_memory_of_its_share_and_one_tensor(ranks: RankPool, tmp_path: Path) -> None:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=8000,
        hidden_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        intermediate_size=512,
        moe_intermediate_size=512,
        num_experts=8,
        num_experts_per_tok=2,
    )
    theirs = transformers.Qwen3MoeForCausalLM(config).bfloat16()
    total = 4 * sum(parameter.numel() for parameter in theirs.parameters())
    theirs.save_pretrained(tmp_path)
    largest = 4 * 8000 * 512
    for growth, held, num_read in ranks.run(peak_growth, 4, tmp_path, timeout=240):
        print(f"holds {held / 1e6:.1f} MB of {total / 1e6:.1f}, grew by {growth / 1e6:.1f}, read {num_read / 1e6:.1f}")
        assert held < 0.27 * total
        assert growth < held + largest, (growth, held)
        assert num_read < 1.02 * held / 2  # they are stored in two bytes


def start(rank: int, config: RunConfig) -> None:
    with on_ranks():
        train("qwen3", "qwen3_debugmodel_moe", config)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("missing", r"tensor model\.norm\.weight is missing"),
        ("unexpected", r"tensor model\.extra\.weight \(3,\) is unexpected"),
        ("infinite", r"model\.norm\.weight is not finite"),
        ("other model", r"is of another model: model\.moe\.top_k 2 \(the folder: 3\)"),
    ],
)
def test_what_does_not_fit_is_one_line_on_all_ranks(ranks: RankPool, damage: str, message: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from their_models import make, save

    folder = save(make("qwen3_moe"), tmp_path / "theirs")
    model = read_folder_model(folder).model
    tensors = load_file(folder / "model.safetensors")
    if damage == "missing":
        del tensors["model.norm.weight"]
    elif damage == "unexpected":
        tensors["model.extra.weight"] = torch.ones(3)
    elif damage == "infinite":
        tensors["model.norm.weight"][5] = torch.inf
    else:
        model = replace(model, moe=replace(model.moe, top_k=2))
    save_file(tensors, folder / "model.safetensors")
    (tmp_path / "text.txt").write_text("some words to learn from " * 50)
    config = RunConfig(
        model=model,
        job=Job(str(tmp_path / "run")),
        training=Training(steps=1, seq_len=16, local_batch_size=2, threads=1),
        checkpoint=Checkpoint(initial_load_path=str(folder)),
        data=Data(path=str(tmp_path / "text.txt")),
        metrics=Metrics(sample_tokens=0),
    )
    with pytest.raises(RankError, match=message) as error:
        ranks.run(start, 2, config, timeout=120)
    told = [line for line in str(error.value).splitlines() if "ValueError: checkpoint.initial_load_path" in line]
    assert told
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
