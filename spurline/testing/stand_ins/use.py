"""`--import spurline.testing.stand_ins.use`: stand-ins in the place of libraries that are missing. Free of torch."""

from spurline.testing.stand_ins import install

install()
