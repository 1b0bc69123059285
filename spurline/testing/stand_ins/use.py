"""`--import spurline.testing.stand_ins.use`: install stand-ins for missing libraries. Torch-free."""

from spurline.testing.stand_ins import install

install()
