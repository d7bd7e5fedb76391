"""The tests of Megatron-FR."""
