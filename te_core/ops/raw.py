"""The operations as our own layers call them: nothing looks at what failed (`te_core.ops` does, for 0.2 us a call)."""
# ruff: noqa: F403

from te_core.ops.activation import *
from te_core.ops.attention import *
from te_core.ops.attention_fp8 import *
from te_core.ops.attention_merge import *
from te_core.ops.attention_scored import *
from te_core.ops.context import *
from te_core.ops.context_rows import *
from te_core.ops.elementwise import *
from te_core.ops.gemm import *
from te_core.ops.gemm_grouped import *
from te_core.ops.gemm_quantized import *
from te_core.ops.kv_cache import *
from te_core.ops.loss import *
from te_core.ops.matrix import *
from te_core.ops.norm import *
from te_core.ops.optimizer import *
from te_core.ops.padding_order import *
from te_core.ops.permute import *
from te_core.ops.quantize import *
from te_core.ops.quantize_grouped import *
from te_core.ops.rope import *
from te_core.ops.router import *
from te_core.ops.softmax import *
from te_core.ops.statistics import *
from te_core.ops.swizzle import *
