"""The transforms, a file for each family. Each holds only what is special to it; `statetx._lift` carries states."""
