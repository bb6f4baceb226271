"""The store of measurements and the tables read from it."""
