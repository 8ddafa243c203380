# SPDX-License-Identifier: Apache-2.0
"""Attention sinks, and the checks of a model's attention against vLLM's attention layers.

A sink is one learned number s per query head. It joins the softmax denominator of that head:
p_i = exp(x_i) / (exp(s) + sum_j exp(x_j)), for the logits x of one query. Transformers models pass
their sinks to the attention interface as `s_aux` (see `eager_attention_forward` of GPT-OSS).
"""
