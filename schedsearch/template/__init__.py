"""Templates: the contract, what they hand over, and which there are."""

from __future__ import annotations

from schedsearch.template.contract import Reference, Template, magnitude_of
from schedsearch.template.registry import TemplateSet, load_reference, load_template, load_templates, template_names
from schedsearch.template.source import KernelSource, KernelStep

__all__ = [
    "KernelSource",
    "KernelStep",
    "Reference",
    "Template",
    "TemplateSet",
    "load_reference",
    "load_template",
    "load_templates",
    "magnitude_of",
    "template_names",
]
