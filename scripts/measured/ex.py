import sys; sys.path[:0]=["scripts"]
import peers, user_models
peers.TABLES["models"]["distilbert"]={"class":"DistilBertModel","seq":128}
b=peers.architecture("distilbert"); m=user_models.export(b,"dynamo",None,peers.arrays(b,2,128)); open("/tmp/m/distilbertd.onnx","wb").write(m.SerializeToString())
print([ (o.name,[d.dim_param or d.dim_value for d in o.type.tensor_type.shape.dim]) for o in m.graph.output],[ (o.name,[d.dim_param or d.dim_value for d in o.type.tensor_type.shape.dim]) for o in m.graph.input])
