"""A model family, a router, an experts backend and a dispatcher of a user's own, each known by name.

Parts are given as "module:attribute", so that a command that only lists configs need not load torch.
"""

from spurline.models import register_family
from spurline.moe import register_dispatcher, register_experts_backend, register_router

register_family("my_moe", "my_moe_pack")
register_router("cosine", "my_moe_pack.router:CosineRouter")
register_experts_backend("gathered", "my_moe_pack.experts:gathered_experts")
register_dispatcher("capacity_125", "my_moe_pack.dispatcher:tight")
register_dispatcher("capacity_800", "my_moe_pack.dispatcher:roomy")
