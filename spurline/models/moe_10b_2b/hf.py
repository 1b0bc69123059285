"""The 10B-A2B model in Hugging Face format: DeepSeek-V2, which has the same softmax scores.

V2 has no selection bias, so only a checkpoint whose bias is zero can be exported; train with
model.moe.bias_update_rate 0 to keep it zero.
"""

from spurline.models.deepseek_v3.hf import V2, architecture_for

ARCHITECTURES = (V2,)

__all__ = ["ARCHITECTURES", "architecture_for"]
