"""The paper's data sets: what is published, how to download it, and the readers of TensorFlow Federated's files.

Begin with `catalogue`, which knows every data set; `prepare_tff` writes the stores that training reads.
"""
