"""What the fields of the recipes are."""

TEXT = """
margin: How many powers of two a scale stays below the largest one, for values that grow until the next step.
MXFP8BlockScaling.margin: Accepted; block scales follow from the values themselves, so it changes nothing.
fp8_format: Formats of FP8: Format.E4M3 for all tensors, or Format.HYBRID (E4M3 in forward, E5M2 for gradients).
NVFP4BlockScaling.fp8_format: Format of the block scales: Format.E4M3, the only one allowed.
amax_history_len: How many steps the largest absolute value (amax) of each tensor is remembered.
amax_compute_algo: How the amax that makes a scale follows from the history: "max", "most_recent", or a function
    `f(history) -> amax`.
scaling_factor_compute_algo: Function `f(amax, scale, fp8_max, recipe) -> new scale`. None is fp8_max / amax /
    2^margin.
reduce_amax: Whether all processes of the group use the largest amax of them all.
fp8_dpa: Whether attention itself (both of its products) runs in FP8.
Float8BlockScaling.fp8_dpa: False, the only one allowed: attention has no block scaling.
fp8_mha: Whether attention also takes and gives FP8 tensors between the projections. Read together with
    `fp8_dpa`.
Float8BlockScaling.fp8_mha: False, the only one allowed: attention has no block scaling.
backward_override: How backward multiplies: None quantizes as the recipe says, "high_precision" uses the
    original operands, "dequantized" uses the dequantized operands of forward. Begins as NVTE_BACKWARD_OVERRIDE
    says.
DelayedScaling.backward_override: None, the only one allowed here. Begins as NVTE_BACKWARD_OVERRIDE says.
use_power_2_scales: Whether scales are powers of two. Begins as NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES says.
use_f32_scales: Whether scales may be any float32; otherwise they are powers of two. Begins as
    NVTE_FP8_BLOCK_SCALING_FP32_SCALES says.
x_block_scaling_dim: Blocks of the input: 1 (1 x 128) or 2 (128 x 128). At most one of the three operands may
    have 2.
w_block_scaling_dim: Blocks of the weight: 1 (1 x 128) or 2 (128 x 128).
grad_block_scaling_dim: Blocks of the output's gradient: 1 (1 x 128) or 2 (128 x 128).
fp8_gemm_fprop: Options of forward's product.
fp8_gemm_dgrad: Options of the product that makes the input's gradient.
fp8_gemm_wgrad: Options of the product that makes the weight's gradient.
use_split_accumulator: Whether partial sums are added up in float32, which is exact; False allows the faster
    accumulation of FP8 tensor cores.
enable_2d_quantization: Whether weights are quantized by 32 x 32 tiles, so that both copies have the same
    values.
disable_rht: Whether the random Hadamard transform before wgrad is left out. Begins as NVTE_NVFP4_DISABLE_RHT
    says.
disable_stochastic_rounding: Whether gradients are rounded to nearest. Begins as
    NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING says.
disable_2d_quantization: Whether weights are quantized by 1 x 16 pieces and not by 16 x 16 tiles. Begins as
    NVTE_NVFP4_DISABLE_2D_QUANTIZATION says.
row_scaled_activation: Whether each row of the input has a float32 scale of its own. Begins as
    NVTE_NVFP4_ROW_SCALED_ACTIVATION says.
nvfp4_4over6: Which tensors choose for each block between the largest values 6 and 4, by the smaller error:
    "none", "weights", "activations" or "all". Begins as NVTE_NVFP4_4OVER6 says.
nvfp4_4over6_e4m3_use_256: Which of these tensors limit block scales to 256: "none", "weights", "activations" or
    "all". Begins as NVTE_NVFP4_4OVER6_E4M3_USE_256 says.
nvfp4_4over6_err_mode: Which error is compared: "MAE" (mean absolute) or "MSE" (mean squared).
fp4_format: Format of the values: Format.E2M1, the only one allowed.
qfactory: Function `qfactory(role)` that returns a quantizer or a `QuantizerRequest` for the operand that a
    `QuantizerRole` describes.
quantization_alignment: Of how many rows each group of `Fp8Padding` is made a multiple.
power_2_scale: Whether scales are powers of two.
amax_epsilon: Smallest amax that a scale is made of; a smaller one counts as this.
random_hadamard_transform: Whether the tensor is transformed before its cast.
stochastic_rounding: Whether values are rounded up or down at random, by their distance.
fp4_2d_quantization: Whether blocks are 16 x 16 tiles.
Recipe.args: Fields of the recipe that is made.
Recipe.kwargs: Fields of the recipe that is made, by name.
token: `recipe.token` of a recipe that is still referred to.
recipe: A recipe, such as `DelayedScaling()`.
"""
