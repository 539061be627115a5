"""Int8 layers: the operators that graphs name, their kernels on quantized tensors, checks, and packed weights.

Which layers become int8, and how their ranges are found, is in `fxlib.passes.local.quantize`.
"""

from fxlib.runtime.int8.layers import ACTIVATIONS as ACTIVATIONS
from fxlib.runtime.int8.layers import LARGEST as LARGEST
from fxlib.runtime.int8.layers import WEIGHT_LIMIT as WEIGHT_LIMIT
from fxlib.runtime.int8.operators import LAYERS as LAYERS
from fxlib.runtime.int8.operators import NAMESPACE as NAMESPACE
from fxlib.runtime.int8.operators import is_operator as is_operator
