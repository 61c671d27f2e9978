"""The transforms, one file for each family.

`statetx._lift` carries the states; a file holds only its own family's rules.
"""
