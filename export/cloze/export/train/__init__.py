"""Training: vocabulary, corpus, masking, pre-training, fine-tuning, distillation."""
