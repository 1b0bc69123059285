"""Quantized folders: what is read equals what `transformers` makes of the same bytes, and comes back as bfloat16."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from their_models import load, logits, make, save
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from spurline import config_io
from spurline.hf.exporting import export_run
from spurline.hf.folder import find_tensors
from spurline.hf.importing import import_folder
from spurline.hf.quantized import dequantized, read_whole
from spurline.hf.quantizing import quantize
from spurline.train.checkpoint.manager import CheckpointManager

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
MXFP4 = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def to_fp8(weight_RC: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """The weight in FP8 and a scale for each block, so that the largest of the block is the largest of FP8."""
    rows, columns = weight_RC.shape
    quantized_RC, scales = torch.empty(rows, columns, dtype=torch.float8_e4m3fn), []
    for r in range(0, rows, block[0]):
        scales.append([])
        for c in range(0, columns, block[1]):
            part = weight_RC[r : r + block[0], c : c + block[1]]
            scales[-1].append(part.abs().max() / 448)
            quantized_RC[r : r + block[0], c : c + block[1]] = (part / scales[-1][-1]).to(torch.float8_e4m3fn)
    return quantized_RC, torch.tensor(scales)


def quantize_folder(folder: Path, block: tuple[int, int]) -> dict[str, tuple[Tensor, Tensor]]:
    """Rewrite a folder as DeepSeek publishes its own: projections in FP8, each with its scales."""
    tensors, quantized = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if "proj" in name and name.endswith(".weight")]:
        quantized[name] = to_fp8(tensors[name], block)
        tensors[name], tensors[f"{name}_scale_inv"] = quantized[name]
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    change_config(folder, quantization_config=FP8 | {"weight_block_size": list(block)})
    return quantized


def change_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def read(folder: Path) -> dict[str, Tensor]:
    stored = dequantized(find_tensors(folder), json.loads((folder / "config.json").read_text()), "folder")
    return {name: read_whole(tensor) for name, tensor in stored.items()}


def our_logits(run: Path) -> Tensor:
    model = config_io.load(run / "config.json")[2].model.build().eval()
    CheckpointManager(run, interval=1, keep_latest_k=0).load(0, model, None)
    return logits(model)


def test_fp8_is_read_as_transformers_reads_it_and_written_as_bfloat16(tmp_path: Path) -> None:
    source = save(make("deepseek_v3"), tmp_path / "theirs")
    quantized = quantize_folder(source, (4, 2))  # which divides every shape, as transformers needs
    assert len(quantized) > 20
    expected = {
        name: Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16)
        for name, (weight, scale) in quantized.items()
    }
    found = read(source)
    assert not any(name.endswith("_scale_inv") for name in found)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    import_folder(source, tmp_path / "run")
    export_run(tmp_path / "run", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in expected.items())
    assert "quantization_config" not in json.loads((tmp_path / "back" / "config.json").read_text())
    assert (our_logits(tmp_path / "run") - logits(load(tmp_path / "back"))).abs().max() < 1e-4


def test_the_last_blocks_of_fp8_may_be_smaller(tmp_path: Path) -> None:
    source = save(make("deepseek_v3"), tmp_path / "theirs")
    block = (7, 5)
    quantized = quantize_folder(source, block)
    found = read(source)
    for name, (weight, scale) in quantized.items():
        rows, columns = weight.shape
        expected = weight.float()
        for r in range(rows):
            for c in range(columns):
                expected[r, c] *= scale[r // block[0], c // block[1]]
        assert torch.equal(found[name], expected.bfloat16()), name


def test_nothing_is_rounded_when_fp8_is_imported_as_float32(tmp_path: Path) -> None:
    source = save(make("deepseek_v3"), tmp_path / "theirs")
    weight, scale = quantize_folder(source, (4, 2))["model.layers.0.self_attn.o_proj.weight"]
    import_folder(source, tmp_path / "run", dtype=torch.float32)
    export_run(tmp_path / "run", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")["model.layers.0.self_attn.o_proj.weight"]
    assert torch.equal(back, Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32))


def mxfp4_folder(folder: Path) -> dict[str, Tensor]:
    """Rewrite a folder as gpt-oss is published, with random experts; returns what `transformers` makes of them."""
    tensors, expected = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        num_experts, inputs, outputs = tensors.pop(name).shape
        shape = num_experts, outputs, inputs // 32
        tensors[f"{name}_blocks"] = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
        tensors[f"{name}_scales"] = torch.randint(120, 126, shape, generator=generator, dtype=torch.uint8)
        expected[name] = convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])
        assert expected[name].shape == (num_experts, inputs, outputs)
    save_file(tensors, folder / "model.safetensors")
    change_config(folder, quantization_config=MXFP4)
    return expected


def test_mxfp4_is_read_as_transformers_reads_it_and_written_as_bfloat16(tmp_path: Path) -> None:
    # F differs from D, and both are multiples of 32.
    theirs = make("gpt_oss", intermediate_size=64)
    source = save(theirs, tmp_path / "theirs")
    expected = mxfp4_folder(source)
    found = read(source)
    assert len(expected) == 6
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    import_folder(source, tmp_path / "run")
    with torch.no_grad():
        for name, tensor in expected.items():
            theirs.get_parameter(name).copy_(tensor)
    assert (our_logits(tmp_path / "run") - logits(theirs)).abs().max() < 1e-4
    export_run(tmp_path / "run", tmp_path / "back")
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(torch.equal(back[name], tensor) for name, tensor in expected.items())
    assert torch.equal(logits(load(tmp_path / "back")), logits(theirs))


def without(folder: Path, ending: str) -> str:
    tensors = load_file(folder / "model.safetensors")
    name = next(name for name in sorted(tensors) if name.endswith(ending))
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")
    return name


def test_a_quantized_tensor_without_its_scale_is_an_error_of_one_line(tmp_path: Path) -> None:
    fp8 = save(make("deepseek_v3"), tmp_path / "fp8")
    quantize_folder(fp8, (4, 2))
    name = without(fp8, "_scale_inv")
    with pytest.raises(ValueError, match=rf"is FP8, and its scale {name} is missing") as error:
        import_folder(fp8, tmp_path / "run")
    assert "\n" not in str(error.value)

    mxfp4 = save(make("gpt_oss", intermediate_size=32), tmp_path / "mxfp4")
    mxfp4_folder(mxfp4)
    name = without(mxfp4, "_scales")
    with pytest.raises(ValueError, match=rf"is MXFP4, and its scales {name} are missing") as error:
        import_folder(mxfp4, tmp_path / "run")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_block_size": [8, 2]}, r"in blocks of 8 x 2 needs a scale .* of shape"),
        ({"weight_block_size": None}, r"quantization_config\.weight_block_size is missing"),
        ({"fmt": "e5m2"}, r'quantization_config\.fmt is "e5m2"'),
        ({"quant_method": "awq"}, r'quantization_config\.quant_method is "awq"'),
    ],
)
def test_scales_that_do_not_fit_and_other_formats_are_refused(changes, message, tmp_path: Path) -> None:
    source = save(make("deepseek_v3"), tmp_path / "theirs")
    quantize_folder(source, (4, 2))
    change_config(source, quantization_config=FP8 | {"weight_block_size": [4, 2]} | changes)
    with pytest.raises(ValueError, match=message):
        import_folder(source, tmp_path / "run")


def test_fp8_that_config_json_does_not_mention_is_refused(tmp_path: Path) -> None:
    source = save(make("deepseek_v3"), tmp_path / "theirs")
    quantize_folder(source, (4, 2))
    change_config(source, quantization_config=None)
    with pytest.raises(ValueError, match="has dtype F8_E4M3"):
        import_folder(source, tmp_path / "run")


def test_fp8_export_is_read_by_transformers_and_back_here(tmp_path: Path) -> None:
    import_folder(save(make("qwen2_moe"), tmp_path / "theirs"), tmp_path / "run")
    block = (8, 4)  # which divides every shape, as transformers needs
    export_run(tmp_path / "run", tmp_path / "fp8", fp8_block=block)
    stored, original = (load_file(tmp_path / name / "model.safetensors") for name in ("fp8", "theirs"))
    scales = {name for name in stored if name.endswith("_scale_inv")}
    # All projections, but neither routers, nor the gate of the shared expert, nor embedding, head and norms.
    assert {name.removesuffix("_scale_inv") for name in scales} == {
        name for name in original if "_proj." in name and name.endswith(".weight")
    }
    found = read(tmp_path / "fp8")
    assert found.keys() == original.keys()
    for name, tensor in original.items():
        if f"{name}_scale_inv" not in stored:
            assert torch.equal(found[name], tensor)
            continue
        assert stored[name].dtype == torch.float8_e4m3fn
        weight, scale = to_fp8(tensor, block)
        assert torch.equal(stored[name].float(), weight.float()), name
        assert torch.equal(stored[f"{name}_scale_inv"], scale), name
        as_theirs = Fp8Dequantize(None)._dequantize_one(stored[name], stored[f"{name}_scale_inv"], torch.bfloat16)
        assert torch.equal(found[name], as_theirs)
        assert ((found[name] - tensor).abs() <= 2**-4 * tensor.abs() + scale.max() * 2**-9).all()
    config = transformers.FineGrainedFP8Config(dequantize=True)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", quantization_config=config, dtype=torch.float32
    )
    import_folder(tmp_path / "fp8", tmp_path / "again", dtype=torch.float32)
    assert (our_logits(tmp_path / "again") - logits(theirs)).abs().max() < 1e-4


def test_fp8_blocks_need_matrices(tmp_path: Path) -> None:
    import_folder(save(make("gpt_oss"), tmp_path / "theirs"), tmp_path / "run")
    with pytest.raises(ValueError, match="is a stack of matrices: FP8 blocks are for classes"):
        export_run(tmp_path / "run", tmp_path / "fp8", fp8_block=(8, 4))
    assert not (tmp_path / "fp8").exists()


def test_blocks_of_zeros_and_smaller_last_blocks_are_quantized_too() -> None:
    weight_RC = torch.randn(9, 7)
    weight_RC[:4, :5] = 0
    quantized_RC, scale_rc = quantize(weight_RC, (4, 5))
    assert (quantized_RC.shape, scale_rc.shape) == ((9, 7), (3, 2))
    scale_RC = scale_rc.repeat_interleave(4, 0)[:9].repeat_interleave(5, 1)[:, :7]
    assert ((quantized_RC.float() * scale_RC - weight_RC).abs() <= 2**-4 * weight_RC.abs() + 1e-3).all()
    assert not quantized_RC[:4, :5].float().any()
