# SPDX-License-Identifier: Apache-2.0
"""The model's own output head: whatever its ForCausalLM class does after the base model.

Shapes: N rows of hidden states, H hidden size, P input size of the projection, V vocabulary.
"""
