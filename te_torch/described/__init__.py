"""What the arguments of te_torch's public names are; `describe` writes it into their docstrings.

Each argument is described once: an option of layers in their table, the others by their name in the text of this folder
that their owner belongs to (which may say more of an option, too). Values that a constructor allows come from the rules
that it checks them by, and defaults from its signature.
"""

from te_core.described import Describer, recipes
from te_core.layers.table import OPTIONS
from te_torch.base.options import allowed_values
from te_torch.described import attention, debug, functions, modules, ops, optimizers, tensors

_options = {name: option.about for name, option in OPTIONS.items()}
describe = Describer(_options, functions.TEXT, attention.TEXT, modules.TEXT, allowed=allowed_values).describe
describe_tensors = Describer(recipes.TEXT, tensors.TEXT).describe
describe_optimizers = Describer(optimizers.TEXT).describe
describe_debug = Describer(debug.TEXT).describe
describe_ops = Describer(_options, modules.TEXT, ops.TEXT).describe
