"""The demo: a real model on real text over an emulated cluster, first over Gloo, then over mycel."""
