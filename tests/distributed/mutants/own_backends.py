"""Two experts backends as a user may bring them: `right`, and `wrong` by a thousandth."""

import torch
import torch.nn.functional as F

from spurline.moe import register_experts_backend


def right(rows_RD, w1_eFD, w3_eFD, w2_eDF, rows_per_expert):
    parts = zip(rows_RD.split(list(rows_per_expert)), w1_eFD, w3_eFD, w2_eDF, strict=True)
    return torch.cat([(F.silu(x @ w1.t()) * (x @ w3.t())) @ w2.t() for x, w1, w3, w2 in parts])


def wrong(*arguments):
    return right(*arguments) * 1.001


register_experts_backend("right", right)
register_experts_backend("wrong", wrong)
