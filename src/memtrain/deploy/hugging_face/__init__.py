"""Trained networks for the transformers package of Hugging Face.

Importing this package registers them with transformers: `AutoModelForCausalLM.from_pretrained(DIR)`
then opens what `memtrain export RUN --hf DIR` wrote with memtrain's own code, and needs no
`trust_remote_code`.
"""

from memtrain.errors import MemtrainError

try:
    import transformers
except ImportError:
    raise MemtrainError(
        '--hf: needs the transformers package: pip install "memtrain[hf]"'
    ) from None

from memtrain.deploy.hugging_face.code import write_code
from memtrain.deploy.hugging_face.modeling import MemoryCache, MemtrainConfig, MemtrainForCausalLM

MemtrainForCausalLM.copy_code = staticmethod(write_code)
transformers.AutoConfig.register(MemtrainConfig.model_type, MemtrainConfig, exist_ok=True)
transformers.AutoModelForCausalLM.register(MemtrainConfig, MemtrainForCausalLM, exist_ok=True)

__all__ = ["MemoryCache", "MemtrainConfig", "MemtrainForCausalLM"]
