"""What is minimised: SMT, DMT and BPTT, and the losses they are made of."""
