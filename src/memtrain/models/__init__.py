"""The models: Transformer blocks, the teacher, the recurrent cells, the RNN."""
