"""Sparse tensors of layouts COO, CSR, CSC, BSR and BSC on device ``tpu``.

A sparse tensor is indices and values, dense tensors of the device, in one of PyTorch's own
`SparseTensorImpl` and `SparseCsrTensorImpl`. One kernel, the fallback of the dispatch keys
``SparsePrivateUse1`` and ``SparseCsrPrivateUse1``, takes every op (`tpu_core.sparse.dispatch`):

* ATen's kernel of the CPU, where it does no more than call ops on indices and values;
* a kernel of ours (`coo`, `compressed`), where ATen's reads the memory of the CPU;
* the CPU with copies, counted as a fallback and warned of once (`cpu`).

The number of elements is part of a sparse tensor's shape. An op that changes it by values
(``coalesce()``, ``to_sparse()``, products of two sparse tensors) reads it: a host sync each.
"""
