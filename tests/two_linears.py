"""A model of two linear layers with AdamW, which tests of checkpoints save: as made, and after a step."""

import torch
from torch import nn


def make(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2, dtype=torch.bfloat16))
    return model, torch.optim.AdamW(model.parameters())


def trained(seed=0):
    model, optimizer = make(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer
