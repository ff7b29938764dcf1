"""Attention in plain NumPy: the oracle that the fast functions are checked against.

Every function here has the name, the arguments and the meaning of its fast counterpart (without ``out``,
``num_threads`` and ``progress``) and is written to be read: it builds the whole N x S matrix of scores and walks
through the definition line by line. It computes in float64 whatever the inputs are, so that it is more accurate than
what it checks; ``dtype=numpy.float32`` runs the very same lines in that type instead, which measures the
rounding error that plain NumPy itself makes there. The result has the dtype of the computation.

Arguments are assumed to be legal; the fast functions are the ones that explain what is wrong with a call.

Legend: ``B`` leading (batch) axes, ``H`` query heads, ``K`` key/value heads, ``N`` queries, ``S`` keys, ``D`` query and
key head dim, ``E`` value head dim. Query head ``h`` reads key/value head ``h // (H // K)``.
"""

from ._attention import attention
from ._linear import linear_attention, mhsa_forward
from ._variants import attention_varlen, merge_states, multi_head_attention, scaled_dot_product_attention

__all__ = [
    "attention",
    "attention_varlen",
    "linear_attention",
    "merge_states",
    "mhsa_forward",
    "multi_head_attention",
    "scaled_dot_product_attention",
]
