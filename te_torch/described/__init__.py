"""What the arguments of te_torch's public names are; `describe` writes it into their docstrings.

Each argument is described once, by its name, in the text of this folder that its owner belongs to. Values that a
constructor allows come from the rules that it checks them by, and defaults from its signature.
"""

from te_core.described import Describer, recipes
from te_torch.base.options import allowed_values
from te_torch.described import attention, debug, functions, modules, optimizers, tensors

describe = Describer(functions.TEXT, attention.TEXT, modules.TEXT, allowed=allowed_values).describe
describe_tensors = Describer(recipes.TEXT, tensors.TEXT).describe
describe_optimizers = Describer(optimizers.TEXT).describe
describe_debug = Describer(debug.TEXT).describe
