"""The 10B-A2B model as Hugging Face stores it: a DeepSeek-V2, which has its softmax scores.

V2 has no selection bias. A checkpoint can be written as one as long as its bias is zero, as it stays when the model is
trained with model.moe.bias_update_rate 0.
"""

from spurline.models.deepseek_v3.hf import V2, architecture_for

ARCHITECTURES = (V2,)

__all__ = ["ARCHITECTURES", "architecture_for"]
