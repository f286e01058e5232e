"""Last words of the label of an adapted variant, and of one with additions to the projections."""

ADAPTED, LORA = " · adapted", " · LoRA"
