# SPDX-License-Identifier: Apache-2.0
"""Attention sinks: found where a module passes them, sliced for this rank, and handed to vLLM's layers.

A sink is one learned number a head that joins the softmax denominator of that head's attention.
Transformers models pass theirs to the attention interface as `s_aux`.
"""
