"""Names of operators whose schema does not say enough, grouped by what must be known about them.

`tests/analysis/operators/test_operators.py` checks each list against torch: fresh results share no memory, and whatever
draws random numbers advances the generator.
"""

from __future__ import annotations


def _named(names: str) -> frozenset[str]:
    return frozenset(names.split())


def in_all_forms(names: str) -> frozenset[str]:
    """Return names together with those of their in-place forms, torch's (`add_`) and Python's (`iadd`)."""
    return frozenset(f"{form}{name}{ending}" for name in names.split() for form in ("", "i") for ending in ("", "_"))


UNKNOWN = _named(
    """
    backward register_hook register_post_accumulate_grad_hook retain_grad apply_ map_ map2_ module_load numpy
    share_memory_ set_ set_data storage untyped_storage data_ptr record_stream save load wait seed manual_seed
    initial_seed get_rng_state set_rng_state compile vmap fork is_shared __array__ __dlpack__ __reduce_ex__
    __setstate__ __deepcopy__ to_dlpack handle_torch_function has_torch_function_unary
    has_torch_function_variadic boolean_dispatch
    batch_norm_update_stats _batch_norm_impl_index miopen_batch_norm batch_norm_gather_stats
    batch_norm_gather_stats_with_counts
    """
)
"""Operators that may do anything although torch publishes them: run the user's code, reach the generator's state,
expose memory, or write statistics that their schema calls mere inputs."""

RETURN_ARGUMENT = _named(
    """
    to type type_as cpu cuda float double half bfloat16 long int short char byte bool cfloat cdouble chalf
    contiguous dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout feature_dropout
    positive real conj conj_physical resolve_conj resolve_neg expand_as sum_to_size broadcast_tensors meshgrid
    einsum tensordot as_tensor asarray from_numpy pin_memory unsafe_split unsafe_split_with_sizes unsafe_chunk
    flatten as_subclass dequantize refine_names rename sparse_compressed_tensor _sparse_compressed_tensor_unsafe
    _sparse_coo_tensor_unsafe _sparse_csr_tensor_unsafe _sparse_coo_tensor_with_dims_and_tensors
    """
)
"""Operators that may return an argument, or a view of one, whatever their schema says."""

RETURN_FIRST = _named("to type type_as getitem getattr __getitem__")
"""Operators that may return their first argument, or what it holds, and no other argument."""

UNSAFE_VIEWS = _named(
    """
    _unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk lift sparse_compressed_tensor
    _sparse_coo_tensor_with_dims_and_tensors
    """
)
"""Operators that return a view, or the argument itself, although their schemas deny it."""

NEW_VIEW = _named(
    """
    view select narrow slice unsqueeze squeeze t transpose permute movedim moveaxis swapaxes swapdims chunk
    split split_with_sizes tensor_split unbind diagonal unfold as_strided view_as expand expand_as hsplit vsplit
    dsplit unflatten reshape reshape_as einsum view_as_real view_as_complex detach mT mH T H
    """
)
"""Operators that return a view with an autograd node of its own, so that its gradients are summed separately from the
base's."""

FRESH = _named(
    """
    linear bilinear matmul linalg_matmul inner outer ger conv1d conv2d conv3d conv_transpose1d conv_transpose2d
    conv_transpose3d layer_norm group_norm rms_norm softmax log_softmax softmin special_softmax
    special_log_softmax max_pool1d max_pool2d max_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    adaptive_avg_pool3d adaptive_max_pool1d avg_pool1d lp_pool1d lp_pool2d embedding embedding_bag cross_entropy
    nll_loss l1_loss mse_loss kl_div hinge_embedding_loss cosine_embedding_loss margin_ranking_loss
    triplet_margin_loss poisson_nll_loss binary_cross_entropy_with_logits cosine_similarity pairwise_distance
    cdist one_hot selu relu6 prelu logsigmoid log_sigmoid softsign tanhshrink scaled_dot_product_attention
    concat concatenate hstack vstack dstack row_stack column_stack add sub mul div divide multiply subtract
    true_divide negative absolute clip square where index take_along_dim std var std_mean var_mean min max
    argsort argwhere isfinite isreal isclose greater greater_equal less less_equal not_equal arccos arcsin
    arctan float_power fliplr flipud kron cross diff det quantile nanmean grid_sample gumbel_softmax zeros ones
    full empty rand randn randint arange linspace eye tensor zeros_like ones_like rand_like randn_like full_like
    new_zeros new_ones new_full pad interpolate batch_norm normalize size item tolist dim numel
    """
)
"""Operators that are composite, or written in Python, and yet always return memory of their own. (`normalize` and
pooling divide.)"""

RANDOM = _named(
    """
    dropout dropout_ dropout1d dropout2d dropout3d alpha_dropout alpha_dropout_ feature_dropout feature_dropout_
    feature_alpha_dropout feature_alpha_dropout_ rrelu rrelu_ gumbel_softmax fractional_max_pool2d
    fractional_max_pool3d fractional_max_pool2d_with_indices fractional_max_pool3d_with_indices
    multi_head_attention_forward scaled_dot_product_attention svd_lowrank pca_lowrank lobpcg random_ binomial
    """
)
"""Operators that may draw from a generator, although no tag says so."""

RUNNING_STATISTICS = frozenset({"batch_norm", "instance_norm", "native_batch_norm", "cudnn_batch_norm"})
"""Operators that update statistics which their schema calls mere inputs."""

STATISTICS: frozenset[int | str] = frozenset({1, 2, 3, 4, "running_mean", "running_var"})
"""The arguments that may be these statistics: the second and third in `torch.nn.functional`, and the fourth and fifth,
behind weight and bias, in `torch` and in `aten`, which have operators of the same names."""

RENORMALIZE = frozenset({"embedding", "embedding_bag"})
"""Operators that write their weight if a `max_norm` is given."""

RAISING = _named(
    """
    check_structure
    _assert _assert_async _assert_tensor_metadata _assert_scalar sym_constrain_range sym_constrain_range_for_size
    item int float index math gather index_select take take_along_dim embedding embedding_bag _embedding_bag
    _embedding_bag_forward_only one_hot bincount cross_entropy nll_loss nll_loss2d nll_loss_forward nll_loss2d_forward
    cross_entropy_loss binary_cross_entropy ctc_loss cholesky cholesky_solve cholesky_inverse
    inverse linalg_cholesky linalg_inv linalg_solve linalg_eig linalg_eigh _linalg_eigh linalg_eigvals linalg_eigvalsh
    linalg_svd _linalg_svd linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_solve linalg_ldl_factor linalg_tensorinv
    linalg_tensorsolve linalg_matrix_power svd qr lu_solve triangular_solve masked_select repeat_interleave truediv
    divmod multi_margin_loss multilabel_margin_loss gaussian_nll_loss segment_reduce linalg_pinv pinverse
    linalg_matrix_norm linalg_cond max_unpool1d max_unpool2d max_unpool3d combinations select narrow
    linalg_svdvals linalg_matrix_rank _linalg_eigvals _linalg_check_errors matrix_power nuclear_norm lu _lu_with_info
    histc histogram quantile nanquantile cov istft nll_loss_nd _ctc_loss fake_quantize_per_channel_affine
    multilabel_margin_loss_forward _pack_padded_sequence _index_put_impl_
    """
) | in_all_forms(
    """
    index_add index_copy index_fill index_put index_reduce put scatter scatter_add scatter_reduce masked_scatter
    floor_divide remainder fmod floordiv mod
    """
)
"""Operators that raise depending on values, not only on shapes and dtypes: an unused one may be there as a check.
Others do where one of `CHECKING` is given. (An `_unsafe_index` has positions that are within bounds.)"""

CHECKING = frozenset({"rounding_mode", "check_errors", "sorter"})
"""Arguments with which an operator raises depending on values: a division of integers, `torch.linalg.inv_ex`."""

NO_GRADIENT = _named(
    """
    long int short char byte bool size dim ndimension numel nelement stride item tolist is_floating_point
    is_complex eq ne lt le gt ge equal isnan isinf isfinite isclose allclose not_equal less less_equal greater
    greater_equal logical_and logical_or logical_not logical_xor argmax argmin argsort argwhere nonzero any all
    one_hot zeros ones full empty rand randn randint randperm arange linspace eye zeros_like ones_like rand_like
    randn_like randint_like full_like empty_like new_zeros new_ones new_full new_empty detach bincount
    count_nonzero bucketize searchsorted
    """
)
"""Operators of torch whose result takes no gradient, whatever their arguments."""

FILLABLE = _named(
    """
    zeros ones full empty rand randn arange linspace eye zeros_like ones_like rand_like randn_like full_like empty_like
    new_zeros new_ones new_full new_empty bincount detach
    """
)
"""Operators among these whose result may hold floating-point numbers, and takes a gradient if one is written to it."""

PYTHON_NO_GRADIENT = NO_GRADIENT | _named(
    "check_structure len not_ is_ is_not contains isinstance range slice math resolve get_worker_info"
)
"""Functions of Python whose result takes no gradient. `slice` is also an operator of torch, whose result takes one."""

EXACT = _named(
    """
    _to_copy abs add bitwise_and bitwise_not bitwise_or bitwise_xor ceil clamp clamp_max clamp_min clone copy div eq
    fill floor ge gt hardtanh le logical_and logical_not logical_or logical_xor lt masked_fill mul ne neg
    relu round sign sub threshold trunc where zero
    """
)
"""Operators on real numbers that, without options, round each result at most once, so that its bits are the same in
every layout. (A kernel of `sigmoid` uses one formula for whole vectors and another for the remainder of a row, and that
of `maximum` chooses another one of two zeros.)"""

COMMUTATIVE = _named("add mul bitwise_and bitwise_or bitwise_xor logical_and logical_or logical_xor")
"""Operators whose result has the same bits with the two arguments swapped. (`maximum` distinguishes the signs of
zeros.)"""

TRUTHS = _named("eq ne lt le gt ge logical_and logical_or logical_xor logical_not")
"""Operators that give truth values out of place, and numbers of the argument's dtype in place."""

MEASURING = _named(
    """
    sym_size sym_stride sym_numel sym_storage_offset empty_like zeros_like ones_like full_like rand_like randn_like
    randint_like new_empty new_zeros new_ones new_full new_empty_strided
    """
)
"""Operators that read sizes, strides and dtypes, but no values."""

FLAGS = frozenset({"inplace", "training", "train", "max_norm", "dropout_p"})
"""Arguments that change what an operator does."""

PLAIN_ATTRIBUTES = _named(
    """
    shape dtype device ndim layout requires_grad is_leaf itemsize nbytes is_cuda is_cpu is_meta is_sparse
    is_quantized names grad_fn output_nr name
    """
)
"""Attributes of a tensor that hold none of its memory."""

RREF_METHODS = _named("owner owner_name is_owner")
"""Methods of an RRef that are answered without contacting its owner."""

QUERIES = RREF_METHODS | _named("size dim ndimension numel nelement stride is_floating_point is_complex")
"""Methods that only query, whatever object they belong to."""

METHODS = _named("new_zeros new_ones new_full new_empty new_tensor view reshape size long int float double")

CONSTRUCTORS = _named("tensor as_tensor asarray zeros ones full empty rand randn randint randperm arange linspace eye")

BUILTINS = _named(
    "getattr len int float bool str abs min max sum round tuple list dict slice range isinstance divmod pow"
)

PYTHON_IN_PLACE = _named(
    "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift irshift iconcat setitem"
)
"""Functions of `operator` that write their first argument if it can be written."""

IN_PLACE_METHODS = frozenset(f"__{name}__" for name in (*PYTHON_IN_PLACE, "idiv"))
"""The methods behind these functions."""

PYTHON_SHARING = _named("getitem getattr pos min max sum tuple list dict concat")
"""Functions of Python whose result may be an argument, or contain it."""

OPERATORS = PYTHON_IN_PLACE | _named(
    """
    add sub mul truediv floordiv mod pow matmul neg pos abs and_ or_ xor invert not_ lshift rshift eq ne lt le gt ge
    is_ is_not getitem contains index truth concat
    """
)

ANY_LAYOUT = in_all_forms(
    """
    relu relu6 hardtanh leaky_relu elu selu celu gelu silu mish sigmoid tanh hardswish hardsigmoid softplus exp neg
    abs sqrt rsqrt pow clamp add sub mul div truediv maximum minimum batch_norm dropout feature_dropout cat pad
    max_pool2d avg_pool2d adaptive_avg_pool2d mean interpolate upsample_nearest2d
    upsample_bilinear2d constant_pad_nd conv2d conv_transpose2d convolution
    """
)
"""Operators that accept any layout and preserve it."""

ANY_LAYOUT_MODULES = tuple(
    f"torch.nn.modules.{name}"
    for name in ("activation", "batchnorm", "conv", "dropout", "padding", "pooling", "upsampling")
)
"""Modules of torch in which all classes do the same, except attention."""
