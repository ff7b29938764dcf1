"""fastattn: fast exact attention on a CPU, for NumPy arrays.

>>> import numpy as np, fastattn
>>> q = k = v = np.ones((1, 2, 3, 4), np.float32)
>>> fastattn.attention(q, k, v, causal=True).shape
(1, 2, 3, 4)
"""

from fastattn._attention import attention
from fastattn._cache import KVCache
from fastattn._config import show_config
from fastattn._dispatch import available_isas
from fastattn._linear import linear_attention
from fastattn._merge import merge_states
from fastattn._multi_head import multi_head_attention
from fastattn._paged_cache import PagedKVCache
from fastattn._self_attention import mhsa_forward
from fastattn._threads import get_num_threads, set_num_threads
from fastattn._torch_style import scaled_dot_product_attention
from fastattn._varlen import attention_varlen
from fastattn._version import __version__

__all__ = [
    "KVCache",
    "PagedKVCache",
    "__version__",
    "attention",
    "attention_varlen",
    "available_isas",
    "get_num_threads",
    "linear_attention",
    "merge_states",
    "mhsa_forward",
    "multi_head_attention",
    "scaled_dot_product_attention",
    "set_num_threads",
    "show_config",
]
