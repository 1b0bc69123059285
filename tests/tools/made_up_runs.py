"""Run folders as a trainer writes them, with made-up numbers."""

import json
import math
import random
from pathlib import Path

PARTS = {
    "data": 3,
    "forward": 60,
    "forward.exchange": 18,
    "forward.experts": 30,
    "backward": 120,
    "backward.exchange": 30,
    "backward.experts": 65,
    "optimizer": 22,
    "other": 4,
}
DENSE = {"layers": 0}


def record_of_step(step, steps, layers=3, experts=8, seed=0, lr=4e-3):
    draw = random.Random(step * 1000 + seed)
    done = step / steps
    loss = 1.2 + seed / 10 + 4.3 * math.exp(-6 * done) + draw.gauss(0, 0.06)
    record = {
        "step": step,
        "loss": loss,
        "balance_loss": 3e-4 + draw.gauss(0, 1e-5) if layers else None,
        "grad_norm": 0.6 + 9 * math.exp(-30 * done) + abs(draw.gauss(0, 0.2)),
        "lr": lr * min(1, 10 * done, 2 * (1 - done) + 1e-3),
        "expert_load": {},
        "routing": {},
        "tokens_per_second": 11_000 + draw.gauss(0, 500) - (4000 if step == 1 else 0),
        "tokens_seen": 4096 * step,
        "peak_memory_bytes": int(9e8 + 2e8 * (1 - math.exp(-20 * done))),
        "step_time_parts": {name: ms / 1000 * draw.uniform(0.9, 1.1) for name, ms in PARTS.items()},
    }
    record["step_time"] = sum(record["step_time_parts"].values())
    record["data_wait"] = record["step_time_parts"]["data"]
    for layer in range(1, layers + 1):
        skew = 1.6 * math.exp(-5 * done)
        weights = [math.exp(skew * math.sin(expert * 2.3 + layer) + draw.gauss(0, 0.15)) for expert in range(experts)]
        if layer == layers and done > 0.6:
            weights[2] = 0  # an expert that died
        rows = [int(8192 * weight / sum(weights)) for weight in weights]
        shares = [count / sum(rows) for count in rows if count]
        entropy = -sum(share * math.log(share) for share in shares) / math.log(experts)
        record["expert_load"][f"layers.{layer}.moe"] = rows
        record["routing"][f"layers.{layer}.moe"] = {"entropy": entropy}
    if step % max(1, steps // 12) == 0 or step == steps:
        record["validation_loss"] = loss + 0.08
    return record


def make_run(folder, steps=150, total_steps=None, samples=3, warnings=True, lr=4e-3, **options):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    total = total_steps or steps
    with open(folder / "metrics.jsonl", "w") as file:
        for step in range(1, steps + 1):
            record = record_of_step(step, total, lr=lr, **options)
            if warnings and step == steps - 2:
                record["warnings"] = ["layers.3.moe: expert 2 has had no token for 100 steps. Raise <b>the rate</b>"]
            file.write(json.dumps(record) + "\n")
    config = {
        "module": "deepseek_v3",
        "config": "deepseek_v3_debugmodel",
        "training": {"steps": total, "seq_len": 256},
        "optimizer": {"lr": lr, "beta1": 0.9},
        "model": {"dim": 256, "moe": {"num_experts": 8, "top_k": 2}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    with open(folder / "samples.jsonl", "w") as file:
        for i in range(samples):
            text = "def main():\n    for i in range(10):\n        print(i)\n" * (i + 1) + "</script><b>&"
            file.write(json.dumps({"step": (i + 1) * steps // samples, "text": text}) + "\n")
    return folder
