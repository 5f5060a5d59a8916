"""Where a trace would differ from eager execution: it is made to compute the same, into memory laid out the same.

attention        an encoder that leaves out what is padded
cudnn_recurrent  layers of LSTMs, GRUs and RNNs as cuDNN's kernel
ctc              what stands in for the CTC loss
draws_in_place   draws into memory that is laid out otherwise than contiguous
grouped          grouped matrix products in any type
layouts          the strides that kernels give their results
listed           tensors made of lists with tensors in them
packed           sequences of different lengths
products         derivatives of ``prod`` and ``cumprod``
recurrent        recurrent layers as kernels: those of LSTMs as oneDNN's
variances        the loss of Gaussians checks its variances when the step runs
written          what was written to in place, in the layout it has
"""
