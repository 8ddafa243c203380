# SPDX-License-Identifier: Apache-2.0
"""Repairs of other faults of vLLM, which the models that this package serves need."""
